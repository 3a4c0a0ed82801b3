"""Contract 1: for every K, M, R, schedule, policy and code path, the plain network's gradients.

An update has one mini-batch, or several whose gradients accumulate.

`compare` runs one network through the pipeline and through its reference (plain TensorFlow, none of
our pipeline code) and compares the loss, every gradient by name, every statistic and the hits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import network, pipelining
from lingvo_gpipe.execution import outer_function
from tests.networks import amoeba_nets, mt_nets, sameness_nets, sliced_nets
from tests.support import custom_gradients

SEED, STEP = 11, 5
TOLERANCE = 1e-10  # contract 1, float64


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the grid.

    Attributes:
        accumulate: mini-batches of the update, each of `num_micro_batches`. The reference has the
            micro-batches of all of them.
    """

    net: str
    num_partitions: int
    num_micro_batches: int
    schedule: str
    code_path: str
    recompute: str
    num_replicas: int = 1
    accumulate: int = 1

    def __post_init__(self) -> None:
        if self.accumulate > 1 and self.code_path != "losses inside":
            raise ValueError("under the caller's tape, each call numbers its micro-batches from 0")

    def __str__(self) -> str:
        replicas = f"-R{self.num_replicas}" if self.num_replicas > 1 else ""
        accumulated = f"-A{self.accumulate}" if self.accumulate > 1 else ""
        return (
            f"{self.net}-K{self.num_partitions}-M{self.num_micro_batches}-{self.schedule}-"
            f"{self.code_path}-{self.recompute}{replicas}{accumulated}"
        )


NETS = {
    **sameness_nets.NETS,
    **amoeba_nets.NETS,
    amoeba_nets.IMAGENET.name: amoeba_nets.IMAGENET,
    **mt_nets.NETS,
    **sliced_nets.NETS,
}


# Cuts of nets by K where automatic ones leave a place out: beside the target's embedding.
CUTS = {(mt_nets.SHARED.name, 3): (4, 1, 4)}


@dataclasses.dataclass(frozen=True)
class Grid:
    """Points to compare.

    Attributes:
        axes: values of each field of `Case`.
        apart: pairs of axes whose values need not all be combined in the covering set.
        thinned: n, where the whole set has one in n of all points: those whose places on the axes
            add up to a multiple of n.
    """

    axes: tuple[tuple[Any, ...], ...]
    apart: tuple[tuple[int, int], ...] = ()
    thinned: int = 1

    def whole(self) -> list[tuple[Any, ...]]:
        """Return the whole set."""
        places = itertools.product(*(range(len(axis)) for axis in self.axes))
        return [
            tuple(axis[place] for axis, place in zip(self.axes, chosen, strict=True))
            for chosen in places
            if sum(chosen) % self.thinned == 0
        ]

    def pairs(self) -> set[tuple[int, Any, int, Any]]:
        """Return every two values of different axes that must be combined."""
        return {
            (i, a, j, b)
            for (i, one), (j, other) in itertools.combinations(enumerate(self.axes), 2)
            if (i, j) not in self.apart
            for a, b in itertools.product(one, other)
        }


SMALL_SLICED = (sliced_nets.SLICED.name, sliced_nets.UNEQUALLY.name)
SLICED_TRANSLATION = (sliced_nets.SHARED.name, sliced_nets.PACKED.name)
SCHEDULES = ("gpipe", "1f1b")
OTHER_SCHEDULES = ("interleaved", "looped_bfs", "zb_h1", "zb_v", "dualpipe_v")
INSIDE = ("losses inside",)
CODE_PATHS = (*INSIDE, "own tape")
MOST_AND_LEAST = ("full", "never")
POLICIES = ("full", "except_last", "never")
ANY_TWO_OF_7 = tuple(itertools.combinations(range(7), 2))

# Networks, K, M, schedules, code paths, policies, replicas, mini-batches per update.
# Where programs take seconds to trace, networks and K are apart from other axes: the small networks
# combine those with each other.
GRIDS = (
    Grid((tuple(sameness_nets.NETS), (1, 2, 3, 4), (1, 2, 3, 8), SCHEDULES, CODE_PATHS, POLICIES)),
    # No micro-batch has one or two examples: batch norm reduces them to signs, whose gradients are
    # only rounding errors.
    Grid(
        (tuple(amoeba_nets.NETS), (1, 2, 3, 4), (1, 3), SCHEDULES, INSIDE, MOST_AND_LEAST),
        apart=((0, 1), (0, 2), (0, 3), (0, 5), (1, 2), (1, 3), (1, 5)),
    ),
    # Cuts lie in the encoder, between and in the decoder.
    Grid(
        (tuple(mt_nets.NETS), (1, 2, 3, 5), (1, 3), SCHEDULES, CODE_PATHS, MOST_AND_LEAST),
        apart=(*((0, n) for n in range(1, 6)), (1, 2), (1, 3), (1, 4), (1, 5), (2, 4)),
    ),
    # Replicas: batch norm with dropout, ties, skips, weights that are frozen.
    Grid(
        (
            ("conv", "tied", "skip", "frozen"),
            (1, 2, 3),
            (3, 8),
            SCHEDULES,
            CODE_PATHS,
            POLICIES,
            (2, 3),
        )
    ),
    # Slices in cells of their own, several in a cell, and replicas of them.
    Grid((SMALL_SLICED, (1, 2, 3, 4), (2, 3), SCHEDULES, CODE_PATHS, MOST_AND_LEAST, (1, 2))),
    Grid(
        (SMALL_SLICED, (2, 3), (3,), SCHEDULES, CODE_PATHS, MOST_AND_LEAST, (3,)),
        apart=ANY_TWO_OF_7,
    ),
    Grid(
        (SLICED_TRANSLATION, (1, 2, 3, 4), (2, 3), SCHEDULES, CODE_PATHS, MOST_AND_LEAST, (1, 2)),
        apart=ANY_TWO_OF_7,
    ),
    # Schedules of several cells per device, and those that split backwards.
    Grid(
        (("conv", "tied", "skip"), (2, 3), (1, 3), OTHER_SCHEDULES, CODE_PATHS, POLICIES),
        apart=((0, 5), (2, 5), (4, 5), (0, 4), (2, 4)),
    ),
    # The same over replicas, in slices and by several mini-batches per update, with every policy.
    # The whole set has each combination of any four values.
    Grid(
        (
            ("conv", "tied", "skip", *SMALL_SLICED),
            (2, 3),
            (4,),
            (*OTHER_SCHEDULES, "1f1b", "gpipe", "optimal"),
            INSIDE,
            (*POLICIES, "early", "recompute_grad"),
            (1, 2, 3),
            (1, 2),
        ),
        thinned=3,
    ),
    # The second mini-batch has two examples: one of three replicas computes nothing, but owns
    # weights whose gradients continue.
    Grid(
        (
            ("conv", "tied", "skip", "frozen", *SMALL_SLICED),
            (2,),
            (8,),
            ("1f1b",),
            INSIDE,
            ("full",),
            (3,),
            (2,),
        ),
        apart=tuple(itertools.combinations(range(8), 2)),
    ),
    # A caller's tape over replicas: policies decide what a forward keeps for it.
    Grid(
        (
            ("conv", "sliced_unequal"),
            (3,),
            (4,),
            (*OTHER_SCHEDULES, "1f1b"),
            ("own tape",),
            ("early", "recompute_grad"),
            (2,),
        ),
        apart=ANY_TWO_OF_7,
    ),
)


def grid() -> list[Case]:
    """Return every point of every grid."""
    return [Case(*point) for each in GRIDS for point in each.whole()]


# The covering set: any two values of different axes, except of axes that a grid keeps apart, are
# together in one of these points.
COVERING = (
    Case("conv", 1, 2, "gpipe", "own tape", "never"),
    Case("conv", 2, 1, "interleaved", "losses inside", "full"),
    Case("conv", 2, 3, "zb_h1", "own tape", "never"),
    Case("conv", 2, 4, "gpipe", "losses inside", "recompute_grad"),
    Case("conv", 3, 1, "looped_bfs", "own tape", "never"),
    Case("conv", 4, 8, "1f1b", "losses inside", "full"),
    Case("conv", 2, 4, "1f1b", "losses inside", "early", 1, 2),
    Case("conv", 2, 4, "zb_v", "losses inside", "recompute_grad", 2, 2),
    Case("conv", 2, 4, "dualpipe_v", "losses inside", "recompute_grad", 3),
    Case("conv", 2, 4, "optimal", "losses inside", "except_last", 3),
    Case("dense", 1, 3, "gpipe", "losses inside", "full"),
    Case("dense", 2, 2, "gpipe", "losses inside", "never"),
    Case("dense", 3, 8, "1f1b", "own tape", "never"),
    Case("dense", 4, 1, "gpipe", "own tape", "except_last"),
    Case("skip", 2, 1, "zb_h1", "losses inside", "except_last"),
    Case("skip", 2, 1, "zb_v", "own tape", "never"),
    Case("skip", 2, 3, "dualpipe_v", "own tape", "full"),
    Case("skip", 2, 4, "optimal", "losses inside", "full"),
    Case("skip", 4, 2, "gpipe", "losses inside", "except_last"),
    Case("skip", 2, 4, "looped_bfs", "losses inside", "early", 2, 2),
    Case("skip", 1, 8, "1f1b", "own tape", "full", 3),
    Case("skip", 3, 4, "interleaved", "losses inside", "recompute_grad", 3, 2),
    Case("tied", 1, 8, "gpipe", "losses inside", "except_last"),
    Case("tied", 2, 3, "interleaved", "own tape", "never"),
    Case("tied", 2, 3, "looped_bfs", "losses inside", "full"),
    Case("tied", 2, 4, "1f1b", "losses inside", "recompute_grad"),
    Case("tied", 3, 1, "dualpipe_v", "own tape", "never"),
    Case("tied", 3, 3, "zb_v", "losses inside", "except_last"),
    Case("tied", 4, 2, "1f1b", "own tape", "full"),
    Case("tied", 2, 4, "gpipe", "losses inside", "early", 1, 2),
    Case("tied", 2, 4, "optimal", "losses inside", "never", 2, 2),
    Case("tied", 2, 4, "zb_h1", "losses inside", "recompute_grad", 3),
    Case("mixed", 1, 2, "1f1b", "own tape", "never"),
    Case("mixed", 2, 3, "gpipe", "own tape", "except_last"),
    Case("mixed", 3, 1, "1f1b", "own tape", "full"),
    Case("mixed", 4, 8, "gpipe", "losses inside", "full"),
    Case("frozen", 2, 1, "1f1b", "losses inside", "except_last"),
    Case("frozen", 4, 2, "gpipe", "own tape", "never"),
    Case("frozen", 1, 8, "gpipe", "own tape", "full", 2),
    Case("frozen", 3, 3, "gpipe", "own tape", "never", 3),
    Case("recomputed", 1, 1, "1f1b", "own tape", "except_last"),
    Case("recomputed", 2, 8, "1f1b", "own tape", "never"),
    Case("recomputed", 3, 2, "1f1b", "losses inside", "except_last"),
    Case("recomputed", 4, 3, "gpipe", "own tape", "full"),
    Case("amoeba_a_small", 2, 1, "1f1b", "losses inside", "never"),
    Case("amoeba_b_small", 4, 1, "gpipe", "losses inside", "full"),
    Case("amoeba_d_small", 3, 3, "1f1b", "losses inside", "full"),
    Case("translation", 3, 3, "1f1b", "own tape", "full"),
    Case("translation", 5, 1, "gpipe", "losses inside", "full"),
    Case("packed_translation", 5, 1, "1f1b", "own tape", "never"),
    Case("sliced", 1, 2, "1f1b", "own tape", "never"),
    Case("sliced", 2, 4, "looped_bfs", "losses inside", "recompute_grad"),
    Case("sliced", 2, 4, "zb_h1", "losses inside", "early"),
    Case("sliced", 3, 4, "optimal", "losses inside", "early"),
    Case("sliced", 2, 4, "interleaved", "losses inside", "early", 2),
    Case("sliced", 4, 3, "gpipe", "own tape", "full", 2),
    Case("sliced", 2, 4, "dualpipe_v", "losses inside", "except_last", 2, 2),
    Case("sliced", 2, 4, "zb_v", "losses inside", "early", 3),
    Case("sliced_unequal", 1, 3, "1f1b", "own tape", "never"),
    Case("sliced_unequal", 2, 4, "dualpipe_v", "losses inside", "early"),
    Case("sliced_unequal", 2, 4, "interleaved", "losses inside", "except_last"),
    Case("sliced_unequal", 2, 4, "optimal", "losses inside", "recompute_grad"),
    Case("sliced_unequal", 2, 4, "zb_v", "losses inside", "full"),
    Case("sliced_unequal", 4, 2, "gpipe", "losses inside", "full"),
    Case("sliced_unequal", 3, 4, "zb_h1", "losses inside", "full", 2, 2),
    Case("sliced_unequal", 2, 4, "looped_bfs", "losses inside", "except_last", 3),
    Case("sliced_packed_translation", 2, 2, "1f1b", "losses inside", "never", 2),
    Case("sliced_translation", 3, 3, "gpipe", "own tape", "full"),
)


@dataclasses.dataclass
class Answer:
    """Results of a network for one update, pipelined or plain."""

    loss: float
    gradients: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]
    hits: float | None


def params(case: Case, **changes: Any) -> Any:
    """Return the params of a case's pipeline."""
    net = NETS[case.net]
    settings = {
        "layers": net.layers(),
        "num_partitions": case.num_partitions,
        "num_micro_batches": case.num_micro_batches,
        "num_replicas": case.num_replicas,
        "schedule": case.schedule,
        "recompute": case.recompute,
        "cuts": CUTS.get((case.net, case.num_partitions)),
        "dtype": "float64",
        "seed": SEED,
        **net.options,
        **changes,
    }
    return pipelining.PipeliningLayer.Params(**settings)


def build(case: Case, **changes: Any) -> Any:
    """Return the pipeline of a case, built."""
    pipe = params(case, **changes).instantiate()
    pipe.build(NETS[case.net].fields())
    return pipe


def analyze(case: Case) -> network.Analysis:
    """Return the analysis of a case, without running it."""
    fields = tf.nest.map_structure(tf.TensorSpec.from_tensor, NETS[case.net].fields())
    return network.analyze(params(case), fields)


@custom_gradients.forgotten()
def pipelined(case: Case, **changes: Any) -> Answer:
    """Run a case through the pipeline, by its code path."""
    pipe = build(case, **changes)
    if case.code_path == "losses inside":
        loss, gradients, moments, sums = _accumulated(pipe, mini_batches(case))
    else:
        # The caller's function is not always the subject; TensorFlow optimizes one of translation
        # for seconds. It optimizes the programs in it all the same.
        small = case.net in sameness_nets.NETS
        with contextlib.nullcontext() if small else outer_function.unoptimized():
            loss, gradients, moments, sums = _own_tape(pipe, NETS[case.net].fields())
    return Answer(
        float(loss),
        {path: value.numpy() for path, value in gradients.items()},
        {path: value.numpy() for path, value in pipe.merge_moments(moments).items()},
        float(sums["accuracy"]["total"]) if "accuracy" in sums else None,
    )


def _accumulated(pipe: Any, batches: list[dict[str, Any]]) -> Any:
    """Run the mini-batches of one update, each of which adds to the gradients before it."""
    of_batches = [pipe.loss_weights(batch) for batch in batches]
    weights = {name: tf.add_n([own[name] for own in of_batches]) for name in of_batches[0]}
    results: list[pipelining.Result] = []
    for batch in batches:
        result = pipe.value_and_gradients(
            batch,
            step=STEP,
            loss_weights=weights,
            first_micro_batch=sum(before.num_micro_batches for before in results),
            accumulators=results[-1].gradients if results else None,
        )
        results.append(result)
    return (
        tf.add_n([result.loss for result in results]),
        results[-1].gradients,
        functools.reduce(pipe.add_moments, [result.moments for result in results]),
        tf.nest.map_structure(lambda *same: tf.add_n(same), *(result.sums for result in results)),
    )


def _own_tape(pipe: Any, fields: Any) -> Any:
    weights = pipe.loss_weights(fields)
    coefficients = {loss.name: loss.coefficient for loss in pipe.analysis.losses}

    @tf.function(autograph=False)
    def run() -> Any:
        with tf.GradientTape() as tape:
            ctx = pipe.context(training=True, step=STEP)
            pipe(fields, ctx=ctx)
            loss = tf.add_n(
                [
                    coefficients[name] * total / weights[name]
                    for name, total in ctx.collected.losses.items()
                ]
            )
        gradients = tape.gradient(loss, pipe.weights, unconnected_gradients="zero")
        dense = {path: tf.convert_to_tensor(g) for path, g in gradients.items()}
        return loss, dense, ctx.collected.moments, ctx.collected.sums

    return run()


def parts(count: int, num_micro_batches: int) -> Iterator[slice]:
    """Yield the examples of each micro-batch, larger ones first."""
    for chunk in np.array_split(np.arange(count), min(count, num_micro_batches)):
        yield slice(int(chunk[0]), int(chunk[-1]) + 1)


def _num_examples(fields: dict[str, Any]) -> int:
    return len(tf.nest.flatten(fields)[0])


def _examples(fields: dict[str, Any], part: slice) -> dict[str, Any]:
    """Return the fields of some examples of a mini-batch."""
    examples: dict[str, Any] = tf.nest.map_structure(lambda leaf: leaf[part], fields)
    return examples


def mini_batches(case: Case) -> list[dict[str, Any]]:
    """Return the mini-batches of a case's update, each of consecutive micro-batches."""
    net, each = NETS[case.net], case.num_micro_batches
    fields = net.fields()
    of_update = list(parts(_num_examples(fields), each * case.accumulate))
    return [
        _examples(fields, slice(own[0].start, own[-1].stop))
        for own in (of_update[first : first + each] for first in range(0, len(of_update), each))
    ]


@functools.cache
def _first_weights(name: str) -> dict[str, tf.Tensor]:
    built = build(Case(name, 1, 1, "gpipe", "", "full")).by_path
    return {path: tf.constant(variable) for path, variable in built.items()}


@functools.cache
def reference(name: str, num_micro_batches: int) -> Answer:
    """Run a network as plain TensorFlow, one micro-batch after another under one tape."""
    net = NETS[name]
    fields = net.fields()
    weights = _first_weights(name)
    trained = {
        path: w for path, w in weights.items() if path not in net.frozen and "/moving_" not in path
    }
    losses: list[tf.Tensor] = []
    inputs: dict[str, list[tf.Tensor]] = {}
    hits: list[float] = []
    with tf.GradientTape() as tape:
        tape.watch(list(trained.values()))
        for m, part in enumerate(parts(_num_examples(fields), num_micro_batches)):
            cut = _examples(fields, part)
            sums = net.reference(weights, cut, functools.partial(_draw, m))
            losses += [
                coefficient * sums.losses[loss] / weight
                for loss, (coefficient, weight) in net.weights.items()
            ]
            for path, value in sums.norm_inputs.items():
                inputs.setdefault(path, []).append(value)
            hits += [] if sums.hits is None else [float(sums.hits)]
        loss = tf.add_n(losses)
    gradients = tape.gradient(loss, trained, unconnected_gradients="zero")
    statistics = {}
    for path, values in inputs.items():
        flat = np.concatenate([v.numpy().reshape(-1, v.shape[-1]) for v in values])
        statistics[f"{path}/moving_mean"] = (1 - net.momentum) * flat.mean(0)
        statistics[f"{path}/moving_variance"] = net.momentum + (1 - net.momentum) * flat.var(0)
    return Answer(
        float(loss),
        {path: tf.convert_to_tensor(g).numpy() for path, g in gradients.items()},
        statistics,
        sum(hits) if hits else None,
    )


def _draw(micro_batch: int, path: str) -> tf.Tensor:
    seed = tf.constant([SEED, 0])
    number = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % 2**31
    for fold in (STEP, micro_batch, number):
        seed = tf.random.fold_in(seed, fold)
    return seed


class DifferentError(AssertionError):
    """The pipeline and the plain network disagree."""


def compare(got: Answer, wanted: Answer, tolerance: float = TOLERANCE) -> float:
    """Compare two answers; return the worst relative error of a gradient.

    Raises:
        DifferentError: naming what differs first, and by how much.
    """
    if set(got.gradients) != set(wanted.gradients):
        raise DifferentError(f"gradients of {sorted(set(got.gradients) ^ set(wanted.gradients))}")
    if set(got.statistics) != set(wanted.statistics):
        raise DifferentError(f"statistics {sorted(set(got.statistics) ^ set(wanted.statistics))}")
    if not abs(got.loss - wanted.loss) <= tolerance * abs(wanted.loss):
        raise DifferentError(f"loss {got.loss!r}, plain {wanted.loss!r}")
    largest = max(float(np.abs(g).max()) for g in wanted.gradients.values())
    worst = 0.0
    for path, plain in wanted.gradients.items():
        scale = max(float(np.abs(plain).max()), 1e-3 * largest)
        error = float(np.abs(got.gradients[path] - plain).max()) / scale
        if not error <= tolerance:
            raise DifferentError(f"gradient of {path} is off by {error:.1e} of its largest")
        worst = max(worst, error)
    for path, plain in wanted.statistics.items():
        error = float(np.abs(got.statistics[path] - plain).max() / np.abs(plain).max())
        if not error <= tolerance:
            raise DifferentError(f"statistic {path} is off by {error:.1e}")
    if got.hits != wanted.hits:
        raise DifferentError(f"hits {got.hits}, plain {wanted.hits}")
    return worst


def check(case: Case, **changes: Any) -> float:
    """Compare one case with its reference; see `compare`."""
    num_micro_batches = case.num_micro_batches * case.accumulate
    return compare(pipelined(case, **changes), reference(case.net, num_micro_batches))
