"""A pass over the network as a differentiable function, under the caller's own tape.

The tape records nothing of what the cells compute. It records where its tensors enter the pass
(the weights, and the floating fields of the mini-batch) and where they leave it (outputs and
losses): two kinds of `tf.custom_gradient`, between which it sees a scalar, the token. When the tape
asks for gradients, those of all that leaves are collected first, since the token depends on all
that enters. Then the backward slots of the same passes run, once for all that enters.

    weights, fields ── enter ── token ── leave ── outputs, losses
           └── F slots, which the tape does not see ──┘

Each device has an `enter` of its own: in a graph, `tf.custom_gradient` makes one operation of all
its arguments, so that one for all of them would collect every weight on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NoReturn, TypeAlias

import tensorflow as tf

from lingvo_gpipe import errors, precision
from lingvo_gpipe.execution import diagnosis
from lingvo_gpipe.execution.executor import Executor, MiniBatch, read_fields
from lingvo_gpipe.execution.replica_pass import ReplicaPass
from lingvo_gpipe.layers.context import Collected, Context
from lingvo_gpipe.nests import Nest, differentiable, is_differentiable

_WithGradient: TypeAlias = "tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]"
"""Return type of a function for `tf.custom_gradient`: its results and its gradient function."""


def forward(
    executor: Executor, fields: dict[str, Nest], weights: Mapping[str, tf.Tensor], ctx: Context
) -> tuple[dict[str, Nest], Collected]:
    """Run the forward slots; the backward slots run when the caller's tape asks for gradients.

    They run all, whichever weights the tape asks for. Second derivatives are refused.

    Args:
        executor: knows cells and devices.
        fields: all fields of the mini-batch.
        weights: path → every variable's value.
        ctx: context of the call; its seed is that of the run.

    Returns:
        Name → output of the network, and what the layers collected. Gradients flow through
        floating outputs and losses.
    """
    executor.num_micro_batches(fields)  # reports a lower number
    weights = {path: tf.convert_to_tensor(value) for path, value in weights.items()}
    unwatched = {}
    for path, value in weights.items():
        with tf.device(executor.device_of(path)):
            unwatched[path] = tf.stop_gradient(value)
    passes = executor.passes(
        MiniBatch((tf.nest.map_structure(tf.stop_gradient, fields),), ctx.step, {}),
        functools.partial(executor.analysis.tape_pass, training=ctx.training),
        variables=executor.variables.in_read_dtypes(unwatched),
        seed=ctx.root_seed,
    )
    for replica_pass in passes:
        _run(replica_pass, "F")
    collected = executor.collected(passes)
    backward = _Backward(executor, [replica_pass.after_forward() for replica_pass in passes])
    token = backward.enter(weights, fields)
    if token is not None:
        backward.leave(passes, collected, token)
    outputs = executor.outputs(passes)
    versions = executor.analysis.wiring.outputs
    for version, value in read_fields(executor.analysis, fields).items():
        outputs |= {name: value for name, v in versions.items() if v == version}
    return outputs, collected


def _run(replica_pass: ReplicaPass, phases: str) -> None:
    """Run slots of a pass; the error of an eager call names layer and micro-batch."""
    try:
        replica_pass.run(phases)
    except tf.errors.OpError as error:
        if replica_pass.slot is None or not tf.executing_eagerly():
            raise
        raise diagnosis.of_slot(replica_pass, replica_pass.slot, error) from error


class _Backward:
    """The backward slots of a forward that has run; several tapes and losses may ask for them."""

    def __init__(self, executor: Executor, passes: Sequence[ReplicaPass]) -> None:
        self._executor = executor
        self._passes = passes
        # Of the request under way: what came from upstream, by where it left; and the result.
        self._upstream: dict[Hashable, list[tf.Tensor]] = {}
        self._gradients: dict[Hashable, list[tf.Tensor]] | None = None
        self._token: tf.Tensor | None = None  # by which a gradient depends on all that enters

    def enter(
        self, weights: Mapping[str, tf.Tensor], fields: Mapping[str, Nest]
    ) -> tf.Tensor | None:
        """Return a token whose gradient leads to the weights and fields; None: to none."""
        by_device: dict[str | None, dict[Hashable, list[tf.Tensor]]] = {}
        for cell in self._passes[0].network_pass.cells:
            for path in cell.weights:
                by_device.setdefault(self._executor.device_of(path), {})[path] = [weights[path]]
        for name, version in self._executor.analysis.wiring.fields.items():
            by_device.setdefault(None, {})[version] = differentiable(fields[name])
        tokens = []
        for device, sources in by_device.items():
            if any(sources.values()):
                with tf.device(device):
                    tokens.append(self._entered(device, sources))
        self._token = tf.add_n(tokens) if tokens else None
        return self._token

    def _entered(
        self, device: str | None, sources: Mapping[Hashable, list[tf.Tensor]]
    ) -> tf.Tensor:
        flat = [tensor for tensors in sources.values() for tensor in tensors]

        @tf.custom_gradient
        def enter(*_: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], list[tf.Tensor]]]:
            def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
                if self._gradients is None:
                    self._gradients = self._run()
                of_all = self._gradients
                gradients = [g for key in sources for g in of_all.pop(key)]
                with tf.device(device):
                    typed = [
                        precision.cast(g, t.dtype) for g, t in zip(gradients, flat, strict=True)
                    ]
                    return _only_once(typed, [*flat, self._token, upstream])

            return tf.zeros([]), gradient

        return enter(*flat)

    def leave(self, passes: Sequence[ReplicaPass], collected: Collected, token: tf.Tensor) -> None:
        """Replace outputs in `passes` and losses in `collected` by tensors that a tape watches."""
        mode = passes[0].network_pass.mode
        for replica_pass in passes:
            for version in sorted(mode.leaving & mode.differentiable - replica_pass.fields.keys()):
                values = replica_pass.values_of(version)
                device = self._executor.device_of_version(version, replica_pass.replica)
                left = self._left(
                    (replica_pass.replica, version), differentiable(values), token, device
                )
                for m, value in enumerate(_replaced(values, left)):
                    replica_pass.values[m][version] = value
        for cell, device in zip(passes[0].network_pass.cells, passes[0].devices, strict=True):
            names = [loss.name for loss in cell.losses]
            if names:
                losses = [collected.losses[name] for name in names]
                left = self._left(cell.index, losses, token, device)
                collected.losses.update(zip(names, left, strict=True))

    def _left(
        self, place: Hashable, tensors: Sequence[tf.Tensor], token: tf.Tensor, device: str | None
    ) -> list[tf.Tensor]:
        @tf.custom_gradient
        def leave(*_: tf.Tensor) -> _WithGradient:
            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
                if self._gradients is not None or place in self._upstream:  # another request
                    self._upstream, self._gradients = {}, None
                with tf.device(device):
                    given = [tf.convert_to_tensor(g) for g in upstream]
                    self._upstream[place] = [tf.stop_gradient(g) for g in given]
                    return _only_once([tf.zeros([])], given)

            return [tf.identity(tensor) for tensor in tensors], gradient

        with tf.device(device):
            return list(leave(token))

    def _run(self) -> dict[Hashable, list[tf.Tensor]]:
        """Run the backward slots; return path of a weight, or version of a field → gradients."""
        executor, analysis = self._executor, self._executor.analysis
        passes = [replica_pass.after_forward() for replica_pass in self._passes]
        for replica_pass in passes:
            replica_pass.loss_factors = self._loss_factors()
            for version in replica_pass.network_pass.mode.leaving:
                upstream = iter(self._upstream.get((replica_pass.replica, version), ()))
                count = len(differentiable(analysis.specs[version]))
                for m, leaves in enumerate(zip(*[upstream] * count, strict=True)):
                    replica_pass.value_gradients[m][version] = [list(leaves)]
            _run(replica_pass, "B")
        of_weights = executor.gradients(passes)
        gradients: dict[Hashable, list[tf.Tensor]] = {path: [g] for path, g in of_weights.items()}
        for version in analysis.wiring.fields.values():
            parts = [
                replica_pass.added_gradients(version, m)
                for replica_pass in passes
                for m in range(len(replica_pass.micro_batches))
            ]
            gradients[version] = [tf.concat(same, 0) for same in zip(*parts, strict=True)]
        return gradients

    def _loss_factors(self) -> dict[str, tf.Tensor]:
        """Return loss name → the derivative by it of what the tape differentiates."""
        master = self._executor.analysis.params.policy.variable
        factors = {}
        for cell in self._passes[0].network_pass.cells:
            zeros = [tf.zeros([], master)] * len(cell.losses)
            upstream = self._upstream.get(cell.index, zeros)
            for loss, factor in zip(cell.losses, upstream, strict=True):
                factors[loss.name] = precision.cast(factor, master)
        return factors


def _replaced(nest: Nest, leaves: Iterable[tf.Tensor]) -> Nest:
    """Return a nest with its differentiable leaves replaced by `leaves`."""
    rest = iter(leaves)
    flat = [next(rest) if is_differentiable(leaf.dtype) else leaf for leaf in tf.nest.flatten(nest)]
    return tf.nest.pack_sequence_as(nest, flat)


def _only_once(gradients: Sequence[tf.Tensor], by: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return gradients that depend on the tensors `by`, and refuse to be differentiated."""

    @tf.custom_gradient
    def once(*_: tf.Tensor) -> _WithGradient:
        def refuse(*_: tf.Tensor) -> NoReturn:
            raise errors.LayerError(
                "a pipeline has no second derivatives. Compute those of its layers without a "
                "pipeline, or use a loss without gradients in it"
            )

        return list(gradients), refuse

    return list(once(*by))
