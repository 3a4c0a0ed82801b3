"""Programs are measured as a step runs them: several calls, on all devices, of layers and cells."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import layers, network, optim
from lingvo_gpipe.execution import cell_programs, placement
from lingvo_gpipe.keras_layers import adapter
from lingvo_gpipe.network import memory_formulas
from lingvo_gpipe.plan import measuring, profiling
from lingvo_gpipe.schedule.recompute import Work
from tests.lingvo_gpipe.plan.networks import floats, pipe
from tests.tiny_task import tiny_task


class FakeClock:
    """A clock that is read twice per run; each run takes the next of the given seconds."""

    def __init__(self, *seconds: float) -> None:
        self.now = 0.0
        self.readings = 0
        self.seconds = itertools.cycle(seconds)

    def __call__(self) -> float:
        self.readings += 1
        if self.readings % 2 == 0:
            self.now += next(self.seconds)
        return self.now


@pytest.fixture(autouse=True)
def _calls_as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure short programs by several calls, which other tests do not."""
    monkeypatch.setattr(measuring, "_LONG_S", 0.2)


# --- stopwatch ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((100.0, 2.0, 50.0, 1.0), 2.0),  # the median of the runs, and none of the warm-up
        # Of 0.01 s each, three calls take long enough; what one call takes besides is not counted.
        ((0.01, 0.02, 0.07, 0.08, 0.09, 0.01, 0.03, 0.03), (0.08 - 0.03) / 2),
        ((0.1, 0.1, 0.16, 0.16, 0.16, 0.1, 0.1, 0.1), 0.03),
        # Three calls of it end sooner than one that the machine disturbed: an upper bound, never 0.
        ((0.01, 0.01, 0.02, 0.02, 0.02, 0.03, 0.03, 0.03), 0.02 / 3),
    ],
)
def test_the_median_of_several_calls_is_that_of_one(
    seconds: tuple[float, ...], expected: float
) -> None:
    # The graph of several calls is built by a run that does not count.
    clock = FakeClock(*seconds[:2], 1.0, *seconds[2:]) if len(seconds) > 4 else FakeClock(*seconds)
    watch = measuring.Stopwatch(
        ["CPU:0"], runs=3, warm_up=2 if len(seconds) > 4 else 1, clock=clock
    )
    measured = watch.median_s(lambda argument, own: (argument, own), tf.constant(1.0))
    assert measured == pytest.approx(expected)


def test_calls_take_copies_of_the_values_in_turn() -> None:
    taken: list[tf.Tensor] = []
    begun: list[tf.Tensor] = []
    left: list[tf.Tensor] = []

    def call(argument: Any, own: list[tf.Tensor]) -> tuple[Any, list[tf.Tensor]]:
        taken.append(argument)
        begun.append(own[0])
        left.append(own[0] + argument)
        return argument, left[-1:]

    clock = FakeClock(0.006, 0.02, 0.03)
    watch = measuring.Stopwatch(["CPU:0"], num_cells=2, num_live=3, runs=1, warm_up=1, clock=clock)
    watch.median_s(call, tf.constant(1.0), [tf.constant(0.0)])
    several = taken[-5:]  # after the graph of one call
    assert len({id(value) for value in several[:3]}) == 3
    assert [several[3] is several[0], several[4] is several[1]] == [True, True]
    assert all(begun[-k] is left[-k - 2] for k in (1, 2, 3))


@pytest.mark.parametrize("value", [[True], [1], ["a"]])
def test_only_floating_tensors_are_copied_as_gpus_copy_no_others(value: list[object]) -> None:
    tensor = tf.constant(value)
    assert measuring._copy(tensor) is tensor


# --- layers ---------------------------------------------------------------------------------------


def test_a_layer_is_timed_by_forward_kept_and_recomputing_backward() -> None:
    clock = FakeClock(*[1.0] * 3, *[3.0] * 3, *[5.0] * 3, *[4.0] * 3)
    params = pipe(layers.Dense.Params(units=3), layers.MeanSquaredError.Params())
    fields = {"x": floats(4, 2), "target": floats(4, 3)}
    times = profiling.layer_times(params, fields, runs=2, warm_up=1, clock=clock)
    assert times == (Work(1.0, 3.0, 2.0, 4.0),) * 2


@pytest.mark.parametrize(("fields", "count"), [({}, 1), ({"num_partitions": 3}, 2)])
def test_layers_run_on_as_many_devices_at_once_as_cells_on_cores(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, int], count: int
) -> None:
    called: list[str] = []
    run = cell_programs.CellPrograms.run

    def noted(self: Any, *args: Any) -> Any:
        outputs = run(self, *args)
        called.append(tf.nest.flatten(outputs.as_nest())[0].device)
        return outputs

    monkeypatch.setattr(cell_programs.CellPrograms, "run", noted)
    monkeypatch.setattr(placement, "num_cores", lambda: 2)
    own = [layers.Dense.Params(units=3, trainable=False) for _ in range(3)]
    params = pipe(*own, num_micro_batches=3, **fields)
    batch = {"x": floats(3, 3)}
    profiling.layer_times(params, batch, runs=1, warm_up=0, clock=FakeClock(1.0))
    assert len(set(called)) == count


def test_strings_are_read_like_any_field() -> None:
    params, fields = pipe(layers.Identity.Params()), {"x": tf.TensorSpec([4], tf.string)}
    (told,) = profiling.layer_times(params, fields, runs=1, warm_up=0, clock=FakeClock(1.0, 2.0))
    assert told == Work(1.0, 0.0, 0.0, 1.0)


def test_equal_layers_are_measured_once_and_others_each() -> None:
    own = [layers.Dense.Params(units=4) for _ in range(5)] + [layers.Dense.Params(units=3)]
    clock = FakeClock(*(float(n) for n in range(1, 100)))
    times = profiling.layer_times(pipe(*own), {"x": floats(4, 4)}, runs=1, warm_up=0, clock=clock)
    # The first returns no gradient of its input.
    first, *equal, last = times
    assert len(set(equal)) == 1
    assert len({first, equal[0], last}) == 3


def test_the_last_layer_of_a_network_without_a_loss_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs: list[Any] = []
    init = cell_programs.CellPrograms.__init__

    def remember(self: Any, *args: Any) -> None:
        init(self, *args)
        programs.append(self)

    monkeypatch.setattr(cell_programs.CellPrograms, "__init__", remember)
    own = [layers.Dense.Params(units=4) for _ in range(2)] + [layers.Dense.Params(units=3)]
    clock = FakeClock(1.0, 3.0, 5.0, 4.0)
    times = profiling.layer_times(pipe(*own), {"x": floats(4, 4)}, runs=1, warm_up=0, clock=clock)
    assert times == (Work(1.0, 3.0, 2.0, 4.0),) * 3
    for each in programs:
        specs = tf.nest.flatten(each.graphs["F"].structured_outputs)
        assert [spec.shape[0] for spec in specs] == [4]
        assert each.graphs["B"].outputs


def test_skips_ties_and_integers_are_timed_like_any_layer() -> None:
    params = pipe(
        layers.Embedding.Params(vocabulary=9, units=4, reads=("ids",), writes=("x",)),
        layers.Dense.Params(units=4, writes=("skip",)),
        layers.BatchNorm.Params(),
        layers.Add.Params(reads=("x", "skip")),
        layers.SequenceSoftmax.Params(
            vocabulary=9, reads=("x", "label"), tie={"kernel": "embedding/table"}
        ),
        num_partitions=2,
        num_micro_batches=2,
    )
    fields = {"ids": tf.TensorSpec([4, 3], tf.int32), "label": tf.TensorSpec([4, 3], tf.int32)}
    times = profiling.layer_times(params, fields, runs=1, warm_up=0, clock=FakeClock(1.0))
    assert times == (Work(1.0, 1.0, 0.0, 1.0),) * 5


# --- cells ----------------------------------------------------------------------------------------

FIELDS = {name: tf.TensorSpec([8, 4]) for name in ("x", "target")}


class FakeRunner:
    """Remembers which programs of which cells were measured, and with how many copies."""

    def __init__(self, _: Any, __: Any, cell: network.Cell) -> None:
        self.index = cell.index

    def seconds(self, name: str, watch: measuring.Stopwatch) -> float:
        MEASURED.append((self.index, name))
        COPIES.append((watch.num_cells, watch.num_live))
        return 1.0


MEASURED: list[tuple[int, str]] = []
COPIES: list[tuple[int, int]] = []


def measured(
    monkeypatch: pytest.MonkeyPatch, known: profiling.ProgramTimes | None = None, **fields: Any
) -> list[tuple[int, str]]:
    """Return the programs that are measured of a network of three layers and a loss."""
    own = [layers.Dense.Params(units=4) for _ in range(fields.pop("num_layers", 3))]
    settings: dict[str, Any] = {"num_partitions": 2, "num_micro_batches": 4, **fields}
    params = pipe(*own, layers.MeanSquaredError.Params(), **settings)
    MEASURED.clear()
    COPIES.clear()
    monkeypatch.setattr(profiling, "CellRunner", FakeRunner)
    analysis = network.analyze(params, FIELDS)
    needs = [memory_formulas.cell_bytes(analysis, cell) for cell in analysis.cells]
    known = [] if known is None else known
    times = profiling.cell_times(params, analysis, needs, 4, known)
    return list(MEASURED) if times else []


def test_programs_of_equal_cells_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, num_layers=9, num_partitions=5, cuts=(2,) * 5, fuse=False)
    # The first one returns no gradient, the last has a loss.
    assert sorted(found) == [(k, name) for k in (0, 1, 4) for name in ("B", "F")]
    known: profiling.ProgramTimes = []
    split: dict[str, Any] = {"schedule": "zb_h1", "recompute": "never"}
    found = measured(monkeypatch, known, **split)
    assert sorted(found) == [(0, "BK"), (0, "K"), (1, "IK"), (1, "K"), (1, "W")]
    assert measured(monkeypatch, known, **split) == []
    assert measured(monkeypatch, known, schedule="gpipe", recompute="never") == [(1, "BK")]


@pytest.mark.parametrize(
    ("fields", "copies"), [({}, (1, 4)), ({"schedule": "interleaved"}, (2, 4))]
)
def test_values_are_as_many_as_cells_and_live_micro_batches_of_a_device(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], copies: tuple[int, int]
) -> None:
    assert measured(monkeypatch, num_layers=4, **fields)
    assert set(COPIES) == {copies}


def test_cells_that_may_not_fit_the_host_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_memory_bytes", lambda: 100)
    assert measured(monkeypatch) == []


@pytest.mark.parametrize(
    ("table", "is_long"),
    [
        ("0F0,0F1,0B1,0F2,0F3,0I3,0W3,0B2,0B0", True),
        # Two cells, whose programs take two sets of values in turn.
        ("0F0,1F0,0F1,1F1,1B1,1I0,1W0,0B0,0B1,0F2,1F2,1B2,0B2,0F3,1F3,1B3,0B3", False),
    ],
)
def test_every_program_of_a_cell_runs(
    monkeypatch: pytest.MonkeyPatch, table: str, is_long: bool
) -> None:
    monkeypatch.setattr(placement, "num_cores", lambda: 1)
    monkeypatch.setattr(measuring, "_LONG_S", 0.0 if is_long else 100.0)
    monkeypatch.setattr(measuring, "_MOST_CALLS", 3)
    lstm = adapter.from_keras(keras.layers.LSTM(4, return_sequences=True)).set(name="lstm")
    params = pipe(layers.Dense.Params(units=4), lstm, layers.MeanSquaredError.Params())
    params.set(schedule=table, num_micro_batches=4, recompute="except_last", fuse=False)
    fields = {name: tf.TensorSpec([4, 3, 4]) for name in ("x", "target")}
    analysis = network.analyze(params, fields)
    needs = [memory_formulas.cell_bytes(analysis, cell) for cell in analysis.cells]
    times = profiling.cell_times(params, analysis, needs, 2, [])
    assert times is not None
    assert min(times[-1].seconds[phase] for phase in ("F", "B", "W")) > 0.0


# --- update ---------------------------------------------------------------------------------------

DEVICES = ["/device:CPU:0", "/device:CPU:1"]
IDS = {"ids": tf.TensorSpec([4, 3], tf.int32), "label": tf.TensorSpec([4, 3], tf.int32)}


def tied(**changes: Any) -> tuple[network.PipelineParams, network.Analysis]:
    """Return a tied network whose three devices own 200, 30 and 88 numbers."""
    params = pipe(
        layers.Embedding.Params(name="emb", vocabulary=40, units=5, reads=("ids",), writes=("x",)),
        layers.Dense.Params(name="few", units=5),
        layers.Dense.Params(name="wide", units=8),
        layers.Dense.Params(name="narrow", units=5, trainable=False),
        layers.SequenceSoftmax.Params(
            name="head", vocabulary=40, reads=("x", "label"), tie={"kernel": "emb/table"}
        ),
        num_partitions=3,
        num_micro_batches=2,
        cuts=(1, 1, 3),
        **changes,
    )
    return params, network.analyze(params, IDS)


def test_the_devices_with_most_weights_update_what_they_own() -> None:
    assert profiling._heaviest_owners(tied()[1], 1, DEVICES) == {
        "emb/table": DEVICES[0],
        **dict.fromkeys(("wide/kernel", "wide/bias", "head/bias"), DEVICES[1]),
    }
    assert profiling._heaviest_owners(tied(frozen=("emb/*", "wide/*"))[1], 1, DEVICES) == {
        "head/bias": DEVICES[0],
        "few/kernel": DEVICES[1],
        "few/bias": DEVICES[1],
    }


def test_each_call_of_an_update_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    applied = []
    apply = optim.Updater.apply

    def noted(self: Any, gradients: Any, **rest: Any) -> Any:
        applied.append(self)
        return apply(self, {path: tf.ones_like(g) for path, g in gradients.items()}, **rest)

    monkeypatch.setattr(optim.Updater, "apply", noted)
    train = tiny_task(optimizer=optim.Optimizer.Params(name="SGD", learning_rate=0.5)).train
    train.optimizer.groups = (("absent", 0.5),)  # of weights that are not measured
    ticks = itertools.count()
    assert profiling.update_s(train, *tied(), lambda: float(next(ticks))) == 1.0
    calls = next(ticks) // 2
    assert train.optimizer.groups  # the caller's are as they were
    for variable in applied[0]._weights.values():
        np.testing.assert_array_equal(variable.numpy(), np.full(variable.shape, -0.5 * calls))


def test_an_update_that_does_not_fit_in_memory_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = tiny_task(optimizer=optim.Optimizer.Params(name="Adam", learning_rate=0.5)).train
    monkeypatch.setattr(profiling, "devices_at_once", lambda _: DEVICES)
    # 288 numbers, each with two slots, the new values of all of them, and a gradient.
    needed = 4 * 7 * 288
    for memory, fits in ((2 * needed, True), (2 * needed - 2, False)):
        monkeypatch.setattr(profiling, "_memory_bytes", lambda memory=memory: memory)
        assert (profiling.update_s(train, *tied()) is not None) == fits
