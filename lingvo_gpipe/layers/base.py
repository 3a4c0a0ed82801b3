"""Layer: the smallest unit that a cut can separate.

A layer is made from Params, creates no variables, and is a pure function of (theta, inputs, ctx);
`ctx.state` holds its statistics. `Params.fprop_meta` returns what it needs and costs, from fields
and input shapes alone, so that a model of any size is described, cut and planned without a device.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, keras_add, nests, precision
from lingvo_gpipe.layers import keras_references
from lingvo_gpipe.layers.context import Collected as Collected
from lingvo_gpipe.layers.context import Context as Context
from lingvo_gpipe.nests import Nest, SpecNest

keras_add.correct()

Initializer: TypeAlias = "Callable[[tuple[int, ...], tf.DType, int], tf.Tensor]"

Size: TypeAlias = "int | tf.Tensor"
Theta: TypeAlias = dict[str, Any]
"""A layer's weights by name, as tensors; a child's are a `Theta` under its name."""


@dataclasses.dataclass(frozen=True, slots=True)
class VariableSpec:
    """A variable that a layer declares; the pipeline creates it on the device of its cell.

    Attributes:
        path: below the layer, `kernel` or `conv/kernel`.
        shape: static.
        dtype: dtype of the master copy.
        initializer: (shape, dtype, integer seed) → tensor, stateless.
        trainable: False for a frozen weight.
        is_state: not a weight but a statistic, which the layer receives in `ctx.state`.
        group: weight-decay group: "kernel", "bias" or "norm".
        training_only: inference does not use it; counted apart.
        tie: path of a variable of the network that is used instead; None: it is not tied.
        compute: dtype in which the layer receives a weight; None until `fprop_meta` has filled in
            that of the layer's policy.
        gradient_rows: the most rows of it whose gradient is not zero after one micro-batch, or a
            slice's share of those of its table; None: all.
    """

    path: str
    shape: tuple[int, ...]
    dtype: tf.DType
    initializer: Initializer
    trainable: bool = True
    is_state: bool = False
    group: str = "kernel"
    training_only: bool = False
    tie: str | None = None
    compute: tf.DType | None = None
    gradient_rows: int | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the master copy."""
        return self.size * self.dtype.size

    @property
    def is_trained(self) -> bool:
        """Whether updates change it: a weight that is not frozen."""
        return self.trainable and not self.is_state

    @property
    def read_dtype(self) -> tf.DType:
        """The dtype in which programs read it; statistics stay as they are."""
        return self.dtype if self.is_state or self.compute is None else self.compute

    @property
    def read_bytes(self) -> int:
        """Bytes in that dtype."""
        return self.size * self.read_dtype.size


@dataclasses.dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss that a layer adds by `ctx.add_loss(name, sum)`.

    The update's loss is the sum over losses of coefficient · Σ_m sum_m / Σ_m weight_m.

    Attributes:
        name: unique in the network.
        coefficient: its factor in the update's loss.
        weight: fields of the mini-batch → floating scalar (examples, real tokens); computed before
            the first slot, over the whole update.
        training_only: added only where `ctx.training` (an auxiliary head's loss).
        of_batch: whether the weight is that of a mini-batch, however it is read or run in parts.
        by_rows: its sums count the rows of the first tensor that the layer reads, of which an
            example may have several; the network multiplies the weight by as many.
    """

    name: str
    coefficient: float
    weight: Callable[[dict[str, Nest]], tf.Tensor]
    training_only: bool = False
    of_batch: bool = False
    by_rows: bool = False

    def for_rows(self, share: float) -> LossSpec:
        """Return it with a weight for `share` rows of each example."""
        if not self.by_rows or share == 1.0:
            return self
        return dataclasses.replace(self, weight=lambda fields: self.weight(fields) * share)


@dataclasses.dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric that a layer adds by `ctx.add_sum(name, tensors)`.

    Attributes:
        name: unique in the network.
        finish: the nest of sums → result (a scalar, vector or matrix).
        labels: names of a vector's elements, each a separate curve; NaN for an element without
            any example.
    """

    name: str
    finish: Callable[[Nest], tf.Tensor]
    labels: tuple[str, ...] = ()

    def curves(self, result: Iterable[float]) -> dict[str, float]:
        """Return the labelled elements of a result of `finish`, as `name/label`, without NaN."""
        if not self.labels:
            return {}
        pairs = zip(self.labels, map(float, result), strict=True)
        return {f"{self.name}/{label}": value for label, value in pairs if not math.isnan(value)}


class ValueRange(NamedTuple):
    """The integers that a layer takes: 0 to size − 1.

    Attributes:
        size: how many there are.
        setting: field of the layer that sets `size`; empty: the shape of its x does.
        weights: name that it reads too; where that is 0, any integer is taken. None: nowhere.
        ignored: an integer that it takes besides; None: no other.
    """

    size: int
    setting: str
    weights: str | None = None
    ignored: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Meta:
    """What a layer needs and returns, known from params and input shapes alone.

    Attributes:
        outputs: nest of `tf.TensorSpec`; a tuple, one per written name, where there are several.
        variables: every variable of the layer and its children.
        flops_forward: operations of one forward call on these inputs, 2 per multiply-add.
        flops_backward: FLOPs of its gradient by inputs and weights, without recomputation.
        activation_bytes: what a backward call keeps of its forward, inputs not counted.
        losses: that it adds.
        metrics: that it adds.
        undivided: what it does with the examples of a mini-batch together, so that it needs one
            micro-batch; empty: nothing but statistics such as batch norm's.
        value_ranges: name it reads → its integers, where shapes set them; see `Params`, too.
        name: below the layer around it; empty for a layer of the network.
        kind: how descriptions call it, where it is a part of another layer.
        children: Metas of the layers inside it, their variables named as it sees them.
    """

    outputs: SpecNest
    variables: tuple[VariableSpec, ...] = ()
    flops_forward: int = 0
    flops_backward: int = 0
    activation_bytes: int = 0
    losses: tuple[LossSpec, ...] = ()
    metrics: tuple[MetricSpec, ...] = ()
    undivided: str = ""
    value_ranges: Mapping[str, ValueRange] = dataclasses.field(default_factory=dict)
    name: str = ""
    kind: str = ""
    children: tuple[Meta, ...] = ()


class Layer(tf.Module, hyperparams.Configurable):
    """Base of every layer: `Params` says what it needs and returns, `fprop` computes it.

    A layer is a `tf.Module`.

    A subclass declares its fields in a nested `Params(Layer.Params)`, which also has the methods
    that need fields and input shapes alone, `_meta` first. It repeats `params: Params`, so that
    `self.params` has that type. Layers made of other layers inherit `composite.Composite`.
    """

    class Params(hyperparams.Configurable.Params):
        """Fields that every layer has, and what is known of a layer from them alone."""

        name: str = hyperparams.field("", "Path part of the layer; empty: named by its class.")
        reads: tuple[str, ...] = hyperparams.field(("x",), "Names of the stream it reads.")
        writes: tuple[str, ...] = hyperparams.field(("x",), "Names of the stream it writes.")
        dtype: str | None = hyperparams.field(
            None,
            "Precision policy (float32, float64, mixed_bfloat16, mixed_float16); None: that of "
            "the network.",
        )
        trainable: bool = hyperparams.field(True, "False freezes its weights and statistics.")
        training_only: bool = hyperparams.field(
            False, "Inference does not use it (an auxiliary head): its weights are counted apart."
        )
        recompute: bool = hyperparams.field(
            False, "Wraps the layer in tf.recompute_grad inside its cell's program."
        )
        cost: float | None = hyperparams.field(
            None, "Stated cost for the partition (the paper's c_i), in place of FLOPs."
        )
        tie: dict[str, str] = hyperparams.field(
            {}, "Path of a variable of the layer → path of the network's variable used instead."
        )

        @property
        def policy(self) -> precision.Policy:
            """The layer's precision policy."""
            return precision.policy(self.dtype)

        def kind_name(self) -> str:
            """Return how descriptions call the kind of layer: by its class."""
            return class_name(self)

        def consecutive(self, layers: Sequence[Layer.Params] = ()) -> tuple[Layer.Params, ...]:
            """Return the params of the layers of a network that these stand for, in order.

            Default: one layer, these params themselves. A layer larger than a device returns its
            slices; all that follows, such as cuts and checkpoints, sees only those.

            Args:
                layers: params of all layers of the network, named, to which a tie may refer.
            """
            del layers
            return (self,)

        def value_ranges(self) -> dict[str, ValueRange]:
            """Return which integers it takes of the names that it reads: labels, ids.

            A composite returns those of the children that read the same values.
            """
            return {}

        def fprop_meta(self, *inputs: SpecNest) -> Meta:
            """Return what the layer needs and returns, without a variable or a device.

            Args:
                *inputs: a nest of `tf.TensorSpec` per name it reads, static shapes.

            Returns:
                Its Meta, with ties and freezing of the params applied.

            Raises:
                LayerError: the inputs do not fit, or `tie` names no variable of the layer.
            """
            meta = self._meta(*inputs)
            paths = [v.path for v in meta.variables]
            unknown = sorted(set(self.tie) - set(paths))
            if unknown:
                near = errors.suggestion(unknown[0], paths)
                raise errors.LayerError(
                    f"{describe(self)}: tie: no variable {unknown[0]!r}; {near}"
                )
            compute = self.policy.compute
            variables = tuple(
                dataclasses.replace(
                    v,
                    compute=v.compute or compute,
                    trainable=v.trainable and self.trainable,
                    training_only=v.training_only or self.training_only,
                    tie=self.tie.get(v.path, v.tie),
                )
                for v in meta.variables
            )
            return dataclasses.replace(meta, variables=variables)

        @abc.abstractmethod
        def _meta(self, *inputs: SpecNest) -> Meta:
            """Return the Meta of this class; see `fprop_meta`."""

        def compared(self) -> tuple[str, ...]:
            """Return the names it reads to compare with, not to compute on: labels, weights.

            A field of the mini-batch that layers read in no other way comes in the dtype of the
            master weights, whatever the layers compute in. A layer that passes such a name to a
            child returns it too.
            """
            return ()

        def inference(self) -> Layer.Params | None:
            """Return the params that replace these where the network is served.

            What is served are the fields that predictions need: labels, their weights, and where
            examples begin in a packed row are not among them.

            Returns:
                A copy, changed or not, or params of another class; None: the layer is left out, and
                the names it writes keep the values they had before it, if any. A layer that still
                reads a name that is not served is left out too, and so is what it writes.
            """
            return None if self.training_only else self._inference()

        def _inference(self) -> Layer.Params | None:
            """Return what `inference` returns for a layer that is not `training_only`.

            A subclass leaves out what only training uses: a head its label, a layer with an
            auxiliary head that child (its field becomes None, and the label leaves `reads`). What
            remains has the same variables at the same paths, or fewer:

                served = self.copy()
                served.auxiliary = None
                served.reads = served.reads[:2]
                return served
            """
            return self.copy()

        def served(self, outputs: Nest) -> dict[str, Nest]:
            """Return the outputs of a served model whose last layer this is.

            Args:
                outputs: what `fprop` returned, in inference.

            Returns:
                Name → tensor: the written names; a classifier's logits become `probabilities`
                (`heads.SoftmaxHead`, which layers around such a head call as well).
            """
            values = outputs if len(self.writes) > 1 else (outputs,)
            return dict(zip(self.writes, values, strict=True))

    params: Params

    def __init__(self, params: Params) -> None:
        """Make the layer from a copy of `params`; no variables."""
        tf.Module.__init__(self)
        self.params = params.copy().freeze()

    @property
    def policy(self) -> precision.Policy:
        """The layer's precision policy."""
        return self.params.policy

    @abc.abstractmethod
    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """Compute the outputs; pure.

        Args:
            theta: the layer's weights as tensors in the compute dtype, nested by child.
            inputs: the value of the name it reads; a tuple where it reads several.
            ctx: seed, state, step, and where losses and statistics are added.

        Returns:
            The value of the name it writes; a tuple where it writes several.
        """

    def run(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """Call `fprop`, recomputed in the backward pass if params say so."""
        if not self.params.trainable:
            # A layer without weights, and those inside it, learn only here that they are frozen.
            ctx = ctx.replace(frozen=ctx.frozen | {ctx.path})
        if not (self.params.recompute and ctx.training):
            return self.fprop(theta, inputs, ctx)
        return recomputed(self, theta, inputs, ctx)

    def merge_moments(
        self, state: dict[str, tf.Tensor], moments: dict[str, tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        """Return new values of statistics from the moments of the whole update; once per update.

        `fprop` adds moments while `ctx.training`: sums over the micro-batch. It reads the
        statistics as they were before the update. Moments of a frozen layer are ignored, those of a
        recomputed forward are dropped.

        Args:
            state: the layer's statistics by name.
            moments: what `ctx.add_moments` received, added up over all micro-batches.

        Returns:
            Names of `state` → new values, of the same shape and dtype.
        """
        raise errors.LayerError(
            f"{type(self).__name__} adds moments {sorted(moments)} for its state "
            f"{sorted(state)}, but defines no merge_moments"
        )

    def find(self, path: str) -> Layer:
        """Return the layer inside this one at `path` (`block/conv`); "" is the layer itself."""
        if path:
            raise KeyError(path)
        return self


def recompute_grad(
    function: Callable[..., list[tf.Tensor]],
) -> Callable[..., list[tf.Tensor]]:
    """Return `tf.recompute_grad(function)` for positional tensors of any dtype.

    TensorFlow adds a zero to every argument, so that the recomputation waits for the gradient, and
    watches it. What has no gradient (ids, masks, seeds) it warns of or refuses, so the function
    closes over it.
    """

    def call(*flat: tf.Tensor) -> list[tf.Tensor]:
        added = [t.dtype.is_floating or t.dtype.is_complex for t in flat]

        def forward(*numbers: tf.Tensor) -> list[tf.Tensor]:
            rest = iter(numbers)
            return function(*(next(rest) if a else t for t, a in zip(flat, added, strict=True)))

        return tf.recompute_grad(forward)(*(t for t, a in zip(flat, added, strict=True) if a))

    return call


def recomputed(layer: Layer, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
    """Run `layer.fprop` so that the backward pass computes it again instead of keeping it.

    All tensors enter `tf.recompute_grad` as positional arguments and leave it as outputs, collected
    losses and statistics too.
    """
    arguments = (theta, inputs, ctx.state, ctx.root_seed, ctx.step)
    results: list[Nest] = []

    def forward(*flat: tf.Tensor) -> list[tf.Tensor]:
        theta, inputs, state, root_seed, step = tf.nest.pack_sequence_as(arguments, list(flat))
        inner = ctx.replace(state=state, root_seed=root_seed, step=step, collected=Collected())
        outputs = layer.fprop(theta, inputs, inner)
        results[:] = [(outputs, inner.collected.as_nest())]
        return [tf.identity(t) for t in tf.nest.flatten(results[0])]

    flat = recompute_grad(forward)(*tf.nest.flatten(arguments))
    outputs, collected = tf.nest.pack_sequence_as(results[0], list(flat))
    ctx.collected.update(collected)
    return outputs


def class_name(params: Layer.Params) -> str:
    """Return the name of the layer's class."""
    owner: Any = params.owner
    return str(owner.__name__)


def describe(params: Layer.Params) -> str:
    """Return how errors call the layer of `params`: its name and kind."""
    return f"{params.name} ({params.kind_name()})" if params.name else class_name(params)


def spec_bytes(specs: SpecNest) -> int:
    """Return the bytes of a nest of `tf.TensorSpec` with static shapes; other leaves have none."""
    total = 0
    for spec in nests.tensor_specs(specs):
        total += (spec.shape.num_elements() or 0) * max(spec.dtype.size, 1)
    return total


def sizes(x: tf.Tensor) -> list[Size]:
    """Return the sizes of x's axes: integers where they are known; a graph computes the others."""
    if x.shape.is_fully_defined():
        return list(x.shape)
    return [tf.shape(x)[axis] if size is None else size for axis, size in enumerate(x.shape)]


def keras_initializer(name: str, config: Mapping[str, Any]) -> keras.initializers.Initializer:
    """Return a Keras initializer from its name and arguments.

    Raises:
        LayerError: Keras has no such initializer, or its arguments name what would run code.
    """
    keras_references.check([name, config], f"no Keras initializer {name!r}")
    try:
        return keras.initializers.get(
            {"class_name": name, "config": dict(config)} if config else name
        )
    except (ValueError, TypeError) as error:
        raise errors.LayerError(f"no Keras initializer {name!r}: {error}") from error


def initializer(name: str, **config: Any) -> Initializer:
    """Return a stateless initializer from the name of a Keras one.

    Args:
        name: such as "glorot_uniform", "zeros", "VarianceScaling".
        **config: arguments of the Keras class other than the seed.

    Raises:
        LayerError: Keras has no such initializer, or its arguments name what would run code.
    """
    return seeded(keras_initializer(name, config))


def seeded(like: Any) -> Initializer:
    """Return a stateless initializer from one of Keras, or a function that is used as one."""
    settings = like.get_config() if isinstance(like, keras.initializers.Initializer) else {}

    def create(shape: tuple[int, ...], dtype: tf.DType, seed: int) -> tf.Tensor:
        has_seed = "seed" in settings
        new = type(like).from_config({**settings, "seed": seed}) if has_seed else like
        return tf.convert_to_tensor(new(shape, dtype=dtype.name), dtype)

    return create
