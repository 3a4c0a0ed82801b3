"""A network in inference, without partitions, as in exported models.

Its layers run one after another, on the device on which it is called. The layers themselves leave
out what only training needs: labels, losses, auxiliary heads, slots (`Layer.inference`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import tensorflow as tf

from lingvo_gpipe import errors, network, seeds
from lingvo_gpipe.execution import cell_calls, cell_programs, mini_batch
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.network import micro_batches, wiring
from lingvo_gpipe.network.wiring import FIELD
from lingvo_gpipe.pipelining import PipeliningLayer


@dataclasses.dataclass(frozen=True, slots=True)
class InferenceParams:
    """Params of a network in inference.

    Attributes:
        params: params of a pipeline with one cell, one micro-batch and only the needed layers.
        outputs: names of its outputs.
    """

    params: PipeliningLayer.Params
    outputs: tuple[str, ...]


def inference_params(model: PipeliningLayer.Params, available: Collection[str]) -> InferenceParams:
    """Return the params of a pipeline's network in inference.

    Args:
        model: the pipeline.
        available: names of the fields that are served.

    Raises:
        LayerError: an output of the network needs a field that is not served.
    """
    names, lost = set(available), dict[str, str]()
    kept: list[base.Layer.Params] = []
    all_layers = network.layer_params(model)
    for layer in all_layers:
        changed = layer.inference(frozenset(names))
        if changed is None:
            continue
        missing = next((name for name in changed.reads if name not in names), None)
        if missing is None:
            names.update(changed.writes)
            kept.append(changed)
            continue
        names.difference_update(changed.writes)
        why = lost.get(missing, f"{base.describe(layer)} reads {missing!r}, which is not served")
        lost.update(dict.fromkeys(changed.writes, why))
    outputs = wiring.names(model.outputs) or all_layers[-1].writes
    for name in outputs:
        if name not in names:
            why = lost.get(name, "no layer of inference writes it")
            raise errors.LayerError(
                f"{model.name or 'the network'} cannot be exported: its output is {name!r}, but "
                f"{why}. Change the layer's `inference` so that it does not need it, or name other "
                "outputs in model.outputs"
            )
    return _needed(model, kept, outputs, available)


def _needed(
    model: PipeliningLayer.Params,
    kept: list[base.Layer.Params],
    outputs: tuple[str, ...],
    available: Collection[str],
) -> InferenceParams:
    """Leave out the layers that no output needs."""
    needed, unread = set(outputs), list[str]()
    chain: list[base.Layer.Params] = []
    for layer in reversed(kept):
        if not needed & set(layer.writes):
            continue
        # One of several values may have lost its reader, which the wiring would refuse.
        spare = {name: f"{layer.name}_{name}" for name in layer.writes if name not in needed}
        unread += spare.values()
        needed = needed - set(layer.writes) | set(layer.reads)
        layer.writes = tuple(spare.get(name, name) for name in layer.writes)
        chain.append(layer)
    params = network.uncut(model)
    unbatched = tuple(name for name in model.unbatched if name in available)
    params.set(layers=chain[::-1], outputs=(*outputs, *unread), unbatched=unbatched)
    params.set(frozen=(), slices={})  # patterns that have selected already, of all layers
    return InferenceParams(params, outputs)


class InferenceNetwork:
    """A network in inference, with its own variables: fields of a mini-batch → outputs by name.

    Attributes:
        analysis: analysis of its layers.
        by_path: path → variable, zeros at first.
    """

    def __init__(self, model: PipeliningLayer.Params, fields: Mapping[str, SpecNest]) -> None:
        """Make the variables.

        Args:
            model: the pipeline in training.
            fields: name → nest of specs of the fields that are served; rows may be unknown.

        Raises:
            UserError: the fields do not fit the network.
        """
        self._served = inference_params(model, fields)
        params = self._served.params
        self.analysis = network.analyze(params, micro_batches.resized(params, fields, 1))
        layers = [info.params.instantiate() for info in self.analysis.layers]
        self._programs = cell_programs.CellPrograms(0, self.analysis, layers, jit=False)
        with tf.device("CPU:0"):
            self.by_path: dict[str, tf.Variable] = {
                path: tf.Variable(
                    tf.zeros(spec.shape, spec.dtype), trainable=False, name=path.replace("/", ".")
                )
                for path, spec in self.analysis.variables.items()
            }

    def __call__(self, fields: Mapping[str, Nest]) -> dict[str, tf.Tensor]:
        """Run the network in inference."""
        wiring, params = self.analysis.wiring, self._served.params
        (cell,) = self.analysis.evaluation_pass(1, outputs=True).cells
        imports = mini_batch.read_fields(self.analysis, fields)
        values, _ = self._programs.compute(
            cell,
            cell_calls.CellInputs(
                weights=[tf.convert_to_tensor(self.by_path[path]) for path in cell.weights],
                untrained=[tf.convert_to_tensor(self.by_path[path]) for path in cell.untrained],
                imports=imports,
                seed=seeds.base_seed(params.seed),
                step=tf.constant(0, tf.int64),
            ),
        )
        outputs: dict[str, tf.Tensor] = {}
        versions = [wiring.outputs[name] for name in self._served.outputs]
        for number in dict.fromkeys(wiring.versions[v].producer for v in versions):
            if number == FIELD:
                unchanged = [v for v in versions if wiring.versions[v].producer == FIELD]
                outputs |= {wiring.versions[v].name: values[v] for v in unchanged}
                continue
            layer = self.analysis.layers[number].params
            written = tuple(values[version] for version in wiring.writes[number])
            served = layer.served(written if len(written) > 1 else written[0])
            prefix = f"{layer.name}_" if set(served) & set(outputs) else ""
            rows = self._rows(wiring.writes[number][0])
            outputs |= {
                f"{prefix}{name}": _per_example(value, rows) for name, value in served.items()
            }
        spare = set(params.outputs) - set(self._served.outputs)
        return {name: value for name, value in outputs.items() if name not in spare}

    def _rows(self, version: int) -> int:
        """Return how many rows of a value belong to one example: its crops."""
        (first, *_) = tf.nest.flatten(self.analysis.specs[version])
        axis = self._served.params.batch_dim
        return int(first.shape[axis]) if axis == 0 and first.shape.rank else 1


def _per_example(value: tf.Tensor, rows: int) -> tf.Tensor:
    """Return the mean of each example's rows."""
    if rows == 1:
        return value
    return tf.reduce_mean(tf.reshape(value, [-1, rows, *value.shape[1:]]), 1)
