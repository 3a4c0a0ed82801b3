"""The variables of a built pipeline, each on the device of the cell that owns it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import tensorflow as tf

from lingvo_gpipe import network, packing, precision, seeds
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import Nest


class PipelineVariables(tf.Module):
    """Every variable of a network by its path.

    Attributes:
        by_path: path → variable: weights, frozen weights and statistics.
    """

    def __init__(
        self,
        analysis: network.Analysis,
        device_of: Callable[[str], str],
        existing: Mapping[str, packing.Variable] | None = None,
    ) -> None:
        """Create the variables, with their initial values.

        Args:
            analysis: analysis of the network.
            device_of: path → device of the variable.
            existing: path → variable that is used as it is, where it lies.
        """
        super().__init__()
        self._specs = analysis.variables
        self._device_of = device_of
        existing = existing or {}
        created = packing.create(
            {
                path: packing.Wanted(
                    spec.shape,
                    spec.dtype,
                    device_of(path),
                    kind="statistics" if spec.is_state else "weights",
                    value=functools.partial(
                        spec.initializer,
                        spec.shape,
                        spec.dtype,
                        seeds.variable_seed(analysis.params.seed, path),
                    ),
                    trainable=spec.is_trained,
                    name=path.replace("/", "."),
                )
                for path, spec in analysis.variables.items()
                if path not in existing
            }
        )
        self.by_path: dict[str, packing.Variable] = {
            path: existing[path] if path in existing else created[path]
            for path in analysis.variables
        }

    def where(self, condition: Callable[[base.VariableSpec], bool]) -> dict[str, packing.Variable]:
        """Return path → variable, for those whose spec meets a condition."""
        return {path: v for path, v in self.by_path.items() if condition(self._specs[path])}

    def read(self) -> dict[str, tf.Tensor]:
        """Read every variable once, on its device, in the dtype in which its layer reads it."""
        return self.in_read_dtypes(packing.read(self.by_path))

    def in_read_dtypes(self, values: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return values by path, on their devices, in the dtype in which layers read them."""
        converted = {}
        for path, value in values.items():
            with tf.device(self._device_of(path)):
                converted[path] = precision.cast(value, self._specs[path].read_dtype)
        return converted

    def read_nested(self, condition: Callable[[base.VariableSpec], bool]) -> dict[str, Nest]:
        """Read the variables whose spec meets a condition, on their devices; nested by layer."""
        tree: dict[str, Nest] = {}
        for path, value in packing.read(self.where(condition)).items():
            *parents, last = path.split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
        return tree

    def merge_moments(
        self, layers: Mapping[str, base.Layer], moments: Mapping[str, Nest]
    ) -> dict[str, tf.Tensor]:
        """Return path → new value of each statistic of the layers that added moments.

        Args:
            layers: name → layer of the network.
            moments: path of a layer → its moments, summed over an update.
        """
        names = self._statistics()
        old = packing.read(
            {
                f"{path}/{name}": self.by_path[f"{path}/{name}"]
                for path in moments
                for name in names[path]
            }
        )
        values = {}
        for path, added in moments.items():
            top, _, rest = path.partition("/")
            with tf.device(self._device_of(f"{path}/{names[path][0]}")):
                statistics = {name: old[f"{path}/{name}"] for name in names[path]}
                for name, value in layers[top].find(rest).merge_moments(statistics, added).items():
                    values[f"{path}/{name}"] = value
        return values

    def add_moments(self, first: Mapping[str, Nest], second: Mapping[str, Nest]) -> dict[str, Nest]:
        """Add two mini-batches' moments by the path of the layer, on the layers' devices."""
        names = self._statistics()
        added = {}
        for path, moments in first.items():
            with tf.device(self._device_of(f"{path}/{names[path][0]}")):
                added[path] = tf.nest.map_structure(tf.add, moments, second[path])
        return added

    def _statistics(self) -> dict[str, list[str]]:
        """Return path of a layer → names of its statistics."""
        by_layer: dict[str, list[str]] = {}
        for path, spec in self._specs.items():
            if spec.is_state:
                layer, _, name = path.rpartition("/")
                by_layer.setdefault(layer, []).append(name)
        return by_layer


def flatten(tree: Mapping[str, Nest], prefix: str = "") -> dict[str, tf.Tensor]:
    """Return path → tensor of a tree that is nested by layer, such as theta."""
    flat: dict[str, tf.Tensor] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}/"))
        else:
            flat[prefix + name] = value
    return flat
