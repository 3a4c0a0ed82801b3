"""What AmoebaNet's cells are made of: operations by name, states made to fit, drop-path.

Every convolution is without bias and followed by batch norm; the order is ReLU, convolution, batch
norm. Padding is "same". Whether an operation ends in a projection depends on the channels that it
reads, which params do not say: a layer here holds every part that it may need, and uses (and
declares the weights of) those that its input asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, layers, precision
from lingvo_gpipe.layers import base, checks, composite, dense, windows
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest, SpecNest

# A truncated normal of variance 2 / n, n = height · width · output channels. The reference's n and
# form; its standard deviation is larger by 0.3 % (it approximates what the truncation takes away).
KERNEL_INIT = "VarianceScaling"
KERNEL_INIT_ARGS = {"scale": 2.0, "mode": "fan_out", "distribution": "truncated_normal"}

NORM = layers.BatchNorm.Params(momentum=0.9, epsilon=1e-5)


def conv(name: str, filters: int, **fields: Any) -> layers.Conv2D.Params:
    """Return a 1×1 convolution of the networks; `fields` make it another."""
    settings = {"kernel_size": 1, "padding": "same", **fields}
    return layers.Conv2D.Params(
        name=name,
        filters=filters,
        use_bias=False,
        kernel_init=KERNEL_INIT,
        kernel_init_args=KERNEL_INIT_ARGS,
        **settings,
    )


def relu(name: str = "relu") -> layers.Activation.Params:
    """Return a ReLU."""
    return layers.Activation.Params(name=name, activation="relu")


def norm(like: layers.BatchNorm.Params, name: str = "norm") -> layers.BatchNorm.Params:
    """Return a batch norm with the settings of `like`."""
    return like.copy().set(name=name)


def by_name(parts: Iterable[layers.Layer.Params]) -> dict[str, layers.Layer.Params]:
    """Return the params of layers by their names, in order."""
    return {params.name: params for params in parts}


class DropPath(layers.Layer):
    """x: [B, ...] → the same; in training whole examples are 0, the others divided by `keep`.

    The share kept falls from 1 at the first update to `keep` at update number `steps`, and stays
    (the reference's schedule "v1"). Drawn per example as a function of (seed, step, micro-batch,
    path). FLOPs: 0.
    """

    class Params(layers.Layer.Params):
        keep: float = hyperparams.required("Share of examples that are kept, in (0, 1].")
        steps: int = hyperparams.field(
            0, "Updates over which the share falls from 1 to `keep`; 0: it is `keep` always."
        )

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            checks.arity(self, inputs, ("x",))
            if not 0.0 < self.keep <= 1.0 or self.steps < 0:
                raise errors.LayerError(
                    f"{base.describe(self)}: keep is {self.keep} and steps {self.steps}, "
                    "expected 0 < keep <= 1 and steps >= 0. keep=1 drops nothing"
                )
            shape = checks.shape(self, inputs[0], "[B, ...]", "It drops examples of one tensor")
            output = tf.TensorSpec(shape, self.policy.compute)
            return base.Meta(output, activation_bytes=base.spec_bytes(output))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        x = precision.cast(inputs, self.policy.compute)
        if not ctx.training or self.params.keep == 1.0:
            return x
        keep = kept_share(self.params.keep, self.params.steps, ctx.step, self.policy.variable)
        sides = tf.concat([tf.shape(x)[:1], tf.ones([x.shape.rank - 1], tf.int32)], 0)
        kept = tf.random.stateless_uniform(sides, ctx.seed) < tf.cast(keep, tf.float32)
        return tf.where(kept, x * tf.cast(1.0 / keep, x.dtype), tf.zeros([], x.dtype))


def kept_share(keep: float, steps: int, step: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return the share of examples that drop-path keeps in update number `step`, a scalar."""
    if steps == 0:
        return tf.constant(keep, dtype)
    passed = tf.minimum(tf.cast(step, dtype) / steps, tf.ones([], dtype))
    return 1.0 - passed * (1.0 - keep)


class FactorizedReduction(layers.Composite):
    """x: [B, H, W, C] floating → [B, ⌈H/2⌉, ⌈W/2⌉, filters].

    It keeps what a stride leaves out: half of the filters come from every second pixel, half from
    the pixels right below those (0 beyond the edge), then batch norm. Variables: path_1/kernel and
    path_2/kernel [1, 1, C, filters / 2], norm.
    """

    class Params(layers.Composite.Params):
        filters: int = hyperparams.required("Output channels, even.")
        norm: layers.BatchNorm.Params = hyperparams.field(NORM, "Settings of its batch norm.")

        def parts(self) -> dict[str, layers.Layer.Params]:
            """See `Composite`."""
            half = self.filters // 2
            paths = [conv(name, half, strides=2, padding="valid") for name in ("path_1", "path_2")]
            return by_name([*paths, norm(self.norm)])

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`."""
            x, shifted = inputs
            return call("norm", call.concat([call("path_1", x), call("path_2", shifted)]))

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            checks.arity(self, inputs, ("x",))
            if self.filters < 2 or self.filters % 2:
                raise errors.LayerError(
                    f"{base.describe(self)}: filters is {self.filters}, and half of them come from "
                    f"each of two paths. Use an even number, such as {max(2, self.filters + 1)}"
                )
            # The shifted image is as large as x.
            return super()._meta(inputs[0], inputs[0])

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        """See `Layer.fprop`."""
        # The gradient of tf.slice is a pad; that of inputs[:, 1:, 1:] is slow on a CPU, see
        # docs/decisions/0011-rounding-of-norms-and-losses.md.
        shifted = tf.slice(inputs, [0, 1, 1, 0], [-1, -1, -1, -1])
        odd_rows, odd_columns = (size % 2 for size in inputs.shape[1:3])
        if odd_rows or odd_columns:  # else no stride reaches beyond the edge
            shifted = tf.pad(shifted, [[0, 0], [0, odd_rows], [0, odd_columns], [0, 0]])
        return self.run_parts(theta, ctx, inputs, shifted)


class Fit(layers.Composite):
    """x: [B, H, W, C] floating, like: [B, H', W', ...] → [B, H', W', filters].

    Where height or width differ, a factorised reduction; where the channels do, a 1×1 convolution
    and batch norm; where nothing does, nothing at all.
    """

    class Params(layers.Composite.Params):
        filters: int = hyperparams.required("Output channels.")
        relu: bool = hyperparams.field(True, "Puts a ReLU before what changes x.")
        norm: layers.BatchNorm.Params = hyperparams.field(NORM, "Settings of its batch norm.")
        reads = ("x", "like")

        def parts(self) -> dict[str, layers.Layer.Params]:
            """See `Composite`."""
            reduce = FactorizedReduction.Params(name="reduce", filters=self.filters, norm=self.norm)
            before = [relu()] if self.relu else []
            return by_name([*before, reduce, conv("conv", self.filters), norm(self.norm)])

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`."""
            x, like = inputs
            if tuple(x.shape[1:3]) != tuple(like.shape[1:3]):
                changes = ["reduce"]
            elif x.shape[3] != self.filters:
                changes = ["conv", "norm"]
            else:
                return x
            return call.chain(["relu", *changes] if self.relu else changes, x)

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            checks.arity(self, inputs, ("x, like",))
            for spec in inputs:
                checks.shape(self, spec, windows.LAYOUT, windows.WAY_OUT)
            return super()._meta(*inputs)

    params: Params


class Operation(layers.Composite):
    """x: [B, H, W, C] floating → [B, ⌈H/stride⌉, ⌈W/stride⌉, filters]: an operation by its name.

    - `none`: x itself, or `1x1` where stride or channels have to change
    - `1x1`: ReLU, convolution, batch norm
    - `3x3`, `1x7_7x1`: narrowed to a quarter of the filters by a 1×1 and widened again
    - `separable_3x3_2` (and 5x5, 7x7): twice ReLU, depthwise, pointwise, batch norm; the stride is
      that of the first. A prefix `dil_2_` means nothing, as in the reference
    - `max_pool_3x3`, `avg_pool_3x3` (and 2x2): the pool, and where channels have to change a 1×1
      convolution and batch norm; the average is that of positions inside the image

    A drop-path ends each but `none`.
    """

    class Params(layers.Composite.Params):
        operation: str = hyperparams.required("Its name in a genotype.")
        filters: int = hyperparams.required("Output channels.")
        stride: int = hyperparams.field(1, "Steps along H and W.")
        norm: layers.BatchNorm.Params = hyperparams.field(NORM, "Settings of its batch norms.")
        drop_path: DropPath.Params | None = hyperparams.field(None, "Drops examples of its output.")

        def kind_name(self) -> str:
            """Return the operation's name."""
            return self.operation

        def parts(self) -> dict[str, layers.Layer.Params]:
            """Return the parts for any number of input channels."""
            return self.parts_for(None)

        def parts_for(self, channels: int | None) -> dict[str, layers.Layer.Params]:
            """Return the parts for that many input channels; None: all that there may be."""
            parts = by_name(_make(self, channels))
            if self.drop_path is not None and self.operation != "none":
                parts["drop_path"] = self.drop_path.copy().set(name="drop_path")
            return parts

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`."""
            return call.chain(self.parts_for(inputs[0].shape[-1]), *inputs)

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            checks.arity(self, inputs, ("x",))
            checks.positive(self, filters=self.filters, stride=self.stride)
            checks.shape(self, inputs[0], windows.LAYOUT, windows.WAY_OUT)
            return super()._meta(*inputs)

    params: Params


def _make(params: Operation.Params, channels: int | None) -> list[layers.Layer.Params]:
    for pattern, make in _OPERATIONS.items():
        if match := re.fullmatch(pattern, params.operation):
            return make(params, channels, *match.groups())
    near = errors.suggestion(params.operation, _NAMES)
    raise errors.LayerError(f"{base.describe(params)}: no operation {params.operation!r}; {near}")


def _none(params: Operation.Params, channels: int | None) -> list[layers.Layer.Params]:
    if params.stride == 1 and channels == params.filters:
        return []
    return _pointwise(params, channels)


def _pointwise(params: Operation.Params, channels: int | None) -> list[layers.Layer.Params]:
    del channels
    return [relu(), conv("conv", params.filters, strides=params.stride), norm(params.norm)]


def _square(params: Operation.Params, channels: int | None) -> list[layers.Layer.Params]:
    del channels
    inner = params.filters // 4
    body: list[layers.Layer.Params] = [
        relu(),
        conv("conv", inner or params.filters, kernel_size=3, strides=params.stride),
        norm(params.norm),
    ]
    return _narrowed(params, body) if inner else body


def _crossed(params: Operation.Params, channels: int | None) -> list[layers.Layer.Params]:
    del channels
    inner = params.filters // 4
    width, stride = inner or params.filters, params.stride
    body: list[layers.Layer.Params] = [
        relu("relu_1x7"),
        conv("conv_1x7", width, kernel_size=(1, 7), strides=(1, stride)),
        norm(params.norm, "norm_1x7"),
        relu("relu_7x1"),
        conv("conv_7x1", width, kernel_size=(7, 1), strides=(stride, 1)),
        norm(params.norm, "norm_7x1"),
    ]
    return _narrowed(params, body) if inner else body


def _narrowed(
    params: Operation.Params, body: list[layers.Layer.Params]
) -> list[layers.Layer.Params]:
    """Return `body` between a 1×1 to a quarter of the filters and one back to all of them."""
    return [
        relu("narrow_relu"),
        conv("narrow_conv", params.filters // 4),
        norm(params.norm, "narrow_norm"),
        *body,
        relu("widen_relu"),
        conv("widen_conv", params.filters),
        norm(params.norm, "widen_norm"),
    ]


def _separable(
    params: Operation.Params, channels: int | None, side: str
) -> list[layers.Layer.Params]:
    del channels
    parts: list[layers.Layer.Params] = []
    for number, stride in enumerate((params.stride, 1), 1):
        pair = layers.SeparableConv2D.Params(
            name=f"separable_{number}",
            filters=params.filters,
            kernel_size=int(side),
            strides=stride,
            padding="same",
            use_bias=False,
            kernel_init=KERNEL_INIT,
            kernel_init_args=KERNEL_INIT_ARGS,
        )
        parts += [relu(f"relu_{number}"), pair, norm(params.norm, f"norm_{number}")]
    return parts


def _pool(
    params: Operation.Params, channels: int | None, kind: str, side: str
) -> list[layers.Layer.Params]:
    pools: dict[str, Any] = {"max": layers.MaxPool2D, "avg": layers.AvgPool2D}
    pool = pools[kind].Params(
        name="pool", pool_size=int(side), strides=params.stride, padding="same"
    )
    if channels == params.filters:
        return [pool]
    return [pool, conv("conv", params.filters), norm(params.norm)]


_OPERATIONS: dict[str, Callable[..., list[layers.Layer.Params]]] = {
    r"none": _none,
    r"1x1": _pointwise,
    r"3x3": _square,
    r"1x7_7x1": _crossed,
    r"(?:dil_2_)?separable_([357])x\1_2": _separable,
    r"(max|avg)_pool_([23])x\2": _pool,
}
_NAMES = (
    "none",
    "1x1",
    "3x3",
    "1x7_7x1",
    "separable_3x3_2",
    "separable_5x5_2",
    "separable_7x7_2",
    "dil_2_separable_5x5_2",
    "max_pool_2x2",
    "max_pool_3x3",
    "avg_pool_2x2",
    "avg_pool_3x3",
)


class WholeConv2D(layers.Layer):
    """x: [B, H, W, C] → [B, filters]: a convolution whose kernel is as large as its input.

    Variables: kernel [H, W, C, filters]. FLOPs: 2·B·H·W·C·filters forward.
    """

    class Params(layers.Layer.Params):
        filters: int = hyperparams.required("Output channels.")
        kernel_init: str = hyperparams.field(KERNEL_INIT, "Name of a Keras initializer.")
        kernel_init_args: dict[str, Any] = hyperparams.field(KERNEL_INIT_ARGS, "Its arguments.")

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            checks.arity(self, inputs, ("x",))
            batch, *sides = checks.shape(self, inputs[0], windows.LAYOUT, windows.WAY_OUT)
            checks.positive(self, filters=self.filters)
            policy = self.policy
            create = base.initializer(self.kernel_init, **self.kernel_init_args)
            kernel = base.VariableSpec("kernel", (*sides, self.filters), policy.variable, create)
            output = tf.TensorSpec((batch, self.filters), policy.compute)
            flops = 2 * batch * kernel.size
            return base.Meta(
                output,
                (kernel,),
                flops_forward=flops,
                flops_backward=dense.backward_flops(self, flops),
                activation_bytes=base.spec_bytes(output),
            )

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        """See `Layer.fprop`."""
        del ctx
        kernel = theta["kernel"]
        size = kernel.shape.num_elements() // self.params.filters
        x = tf.reshape(precision.cast(inputs, self.policy.compute), (-1, size))
        return tf.matmul(x, tf.reshape(kernel, (size, self.params.filters)))
