"""What a user reads when a step fails or a value is not finite: layer, micro-batch, field, row."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, layers, optim, pipelining, task
from lingvo_gpipe.execution import executor, replica_pass
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.run import learner
from tests.networks import pipelines

SCHEDULES = ("gpipe", "1f1b", "split")
SPLIT_TABLES = {
    1: "0F0,0F1,0I0,0W0,0I1,0W1",
    2: "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1W0,1F1,1I1,1W1",
    3: "0F0,0F1,,,,0I0,0W0,0I1,0W1\n,1F0,1F1,,1I0,1W0,1I1,1W1\n,,2F0,2I0,2W0,2F1,2I1,2W1",
}
CLASSES, VOCABULARY = 5, 7


class Faulty(layers.Identity):
    """x: [B, D] → x; reads a row that is not there, forward or backward, for the second half."""

    class Params(layers.Identity.Params):
        backward: bool = hyperparams.field(False, "Fails in the gradient.")

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        del theta, ctx

        def read(x: tf.Tensor, marks: tf.Tensor) -> tf.Tensor:
            """Return x; row 99 is read where the first mark is above 1."""
            rows = tf.range(tf.shape(x)[0])
            return tf.gather(x, rows + tf.cast(marks[0, 0] > 1.0, tf.int32) * 99)

        if not self.params.backward:
            return read(inputs, inputs)

        @tf.custom_gradient
        def identity(x: tf.Tensor) -> Any:
            return tf.identity(x), lambda upstream: read(upstream, x)

        return identity(inputs)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and what the message about it must have."""

    layers: Callable[[], list[Any]]
    label: int
    word: int
    expected: tuple[str, ...]


def stack(*faulty: Any) -> list[Any]:
    """Ids → features; the first features show which half of the mini-batch a row is of."""
    return [
        layers.Embedding.Params(name="words", vocabulary=VOCABULARY, units=4, reads=("word",)),
        layers.Dense.Params(name="first", units=4),
        *faulty,
        layers.Dense.Params(name="second", units=4),
        layers.Softmax.Params(name="head", classes=CLASSES),
    ]


FAULTS = {
    "label": Fault(
        stack, 9, 1, ("field 'label', row 3: 9", "layer head takes 0 to 4 (its classes=5)")
    ),
    "negative label": Fault(stack, -1, 1, ("field 'label', row 3: -1", "layer head")),
    "id": Fault(
        stack, 1, 7, ("field 'word', row 3: 7", "layer words takes 0 to 6 (its vocabulary=7)")
    ),
    "forward": Fault(
        lambda: stack(Faulty.Params(name="faulty")),
        1,
        1,
        (
            "layer faulty, operation GatherV2, micro-batch 0 of 2",
            "indices[0] = 99 is not in [0, 2)",
        ),
    ),
    "backward": Fault(
        lambda: stack(Faulty.Params(name="faulty", backward=True)),
        1,
        1,
        ("layer faulty, ", "of 2", "indices[0] = 99 is not in [0, 2)"),
    ),
}
PATHS = ("value_and_gradients", "evaluate", "tape", "learner")
POINTS = [
    (fault, k, schedule, path)
    for fault, k, schedule, path in itertools.product(FAULTS, (1, 2, 3), SCHEDULES, PATHS)
    if not (path == "evaluate" and fault == "backward")
]
# Each fault with each K, each schedule with each path.
COVERING = [
    point
    for n, point in enumerate(POINTS)
    if (
        list(FAULTS).index(point[0])
        + point[1]
        + SCHEDULES.index(point[2]) * 2
        + PATHS.index(point[3])
    )
    % 5
    == 0
]


def pipeline(fault: Fault, k: int, schedule: str, **fields: Any) -> Any:
    stacked = fault.layers()
    for layer in stacked:
        if layer.name == "words":
            layer.table_init, layer.table_init_args = "constant", {"value": 2.0}
        elif layer.name == "first":
            layer.kernel_init, layer.kernel_init_args = "identity", {}
    return pipelining.PipeliningLayer.Params(
        layers=stacked,
        num_partitions=k,
        num_micro_batches=2,
        schedule=SPLIT_TABLES[k] if schedule == "split" else schedule,
        **fields,
    )


def mini_batch(fault: Fault) -> dict[str, tf.Tensor]:
    return {
        "word": tf.constant([1, 2, 3, fault.word]),
        "label": tf.constant([0, 1, 2, fault.label]),
    }


def run(params: Any, batch: dict[str, tf.Tensor], path: str) -> None:
    if path == "learner":
        trained = task.Task.Params(
            model=params,
            train=task.Train(optimizer=optim.Optimizer.Params(name="SGD", learning_rate=0.1)),
        )
        specs = {name: tf.TensorSpec(v.shape, v.dtype) for name, v in batch.items()}
        learner.Learner(trained, specs).update([batch])
        return
    pipe = params.instantiate()
    if path == "value_and_gradients":
        pipe.value_and_gradients(batch)
    elif path == "evaluate":
        pipe.evaluate(batch)
    else:
        pipe.build(batch)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(pipe(batch, training=True))
        tape.gradient(loss, pipe.weights)


def check(fault: str, k: int, schedule: str, path: str, **fields: Any) -> None:
    wanted = FAULTS[fault]
    with pytest.raises(errors.UserError) as raised:
        run(pipeline(wanted, k, schedule, **fields), mini_batch(wanted), path)
    text = str(raised.value)
    assert "\n" not in text
    assert "{{" not in text
    for part in wanted.expected:
        assert part in text, text


@pytest.mark.parametrize(("fault", "k", "schedule", "path"), COVERING)
def test_the_cause_of_an_error_is_named(fault: str, k: int, schedule: str, path: str) -> None:
    check(fault, k, schedule, path)


@pytest.mark.reliability_full
@pytest.mark.parametrize(("fault", "k", "schedule", "path"), POINTS)
@pytest.mark.parametrize("recompute", ["full", "except_last", "never"])
def test_the_cause_of_every_error_is_named(
    fault: str, k: int, schedule: str, path: str, recompute: str
) -> None:
    check(fault, k, schedule, path, recompute=recompute)


@pytest.mark.parametrize("fault", ["label", "id"])
@pytest.mark.parametrize("k", [1, 3])
def test_a_value_out_of_range_is_named_where_it_is_looked_for_only_after_the_error(
    fault: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor.Executor, "checked", lambda _, *parts: parts)
    check(fault, k, "1f1b", "value_and_gradients")


class Huge(layers.Identity):
    """x → x; needs a tensor of 14.6 TiB, whose size is not known while tracing."""

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        del theta
        rows = tf.cast(tf.reduce_max(inputs) * 0 + 1, tf.int32) * 1_000_000
        noise = tf.random.stateless_uniform(tf.stack([rows, 4_000_000]), ctx.seed)
        return inputs + tf.reduce_sum(noise)


def lack_of_memory(path: str) -> errors.StepError:
    """Return the error of a step whose cell 1 asks for too much; TensorFlow waits 10 s for it."""
    params = pipeline(
        Fault(lambda: stack(Huge.Params(name="huge")), 1, 1, ()), 2, "1f1b", cuts=(2, 3)
    )
    with pytest.raises(errors.StepError) as raised:
        run(params, mini_batch(FAULTS["forward"]), path)
    assert raised.value.layer == "huge"
    text = str(raised.value)
    assert "out of memory on device 1, for a tensor float [1000000,4000000] of 14.6 TiB. " in text
    for setting in ("num_micro_batches", "num_partitions", "recompute="):
        assert setting in text
    assert "\n" not in text
    return raised.value


@pytest.mark.parametrize(
    "path",
    [
        "learner",
        *(
            pytest.param(path, marks=pytest.mark.reliability_full)
            for path in ("value_and_gradients", "evaluate", "tape")
        ),
    ],
)
def test_a_lack_of_memory_is_one_line(path: str) -> None:
    assert str(lack_of_memory(path)).endswith("--mode=plan shows what each device needs")


@pytest.mark.parametrize(
    ("num_replicas", "message", "shown"),
    [
        (
            1,
            "OOM when allocating tensor with shape[1024,1024] and type float on /job:localhost/"
            "replica:0/task:0/device:GPU:1 by allocator GPU_1_bfc",
            "device 1, for a tensor float [1024,1024] of 4.00 MiB. ",
        ),
        (2, "OOM when allocating tensor with shape[2] and type float", "a device, for a tensor"),
        (1, "failed to allocate memory", "device 1. Raise "),
        (1, "Out of memory while trying to allocate 8589934592 bytes.", "device 1. Raise "),
    ],
)
def test_a_lack_of_memory_that_no_slot_has_alone_names_the_layer_of_tensorflows_message(
    num_replicas: int, message: str, shown: str
) -> None:
    params = pipeline(FAULTS["label"], 2, "gpipe", num_replicas=num_replicas)
    pipe, batch = params.instantiate(), mini_batch(FAULTS["forward"])
    pipe.build(batch)
    message = f"{message}\n\t [[{{{{node gradient_tape/second/mul}}}}]]"
    explained = pipe.explain(tf.errors.ResourceExhaustedError(None, None, message), batch)
    assert isinstance(explained, errors.StepError)
    assert str(explained).startswith(f"layer second: out of memory on {shown}")


def test_values_are_dropped_when_no_slot_reads_them_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that failed is run again slot by slot; that must not need more memory than it had."""
    pipe, batch = pipeline(FAULTS["label"], 2, "1f1b").instantiate(), mini_batch(FAULTS["forward"])
    pipe.build(batch)
    runs: list[replica_pass.ReplicaPass] = []
    begin = executor.Executor.training_passes

    def noted(self: executor.Executor, fields: Any) -> list[replica_pass.ReplicaPass]:
        runs.extend(begin(self, fields))
        return runs

    monkeypatch.setattr(executor.Executor, "training_passes", noted)
    pipe.explain(tf.errors.UnavailableError(None, None, "lost"), batch)
    assert len(runs) == 1
    assert (runs[0].values, runs[0].value_gradients, runs[0].held) == ({}, {}, {})


def test_an_error_in_the_callers_own_function_is_explained_on_request() -> None:
    fault = FAULTS["forward"]
    pipe, batch = pipeline(fault, 3, "1f1b").instantiate(), mini_batch(fault)
    pipe.build(batch)
    step = tf.function(lambda fields: pipe.value_and_gradients(fields).loss, autograph=False)
    with pytest.raises(tf.errors.OpError) as raised:
        step(batch)
    explained = pipe.explain(raised.value, batch)
    assert isinstance(explained, errors.StepError)
    assert (explained.layer, explained.micro_batch) == ("faulty", 0)


@pytest.mark.parametrize("faulty", [0, 1])
def test_the_mini_batch_at_fault_is_found_among_those_of_an_update(faulty: int) -> None:
    fault = FAULTS["forward"]
    good = {"word": tf.constant([1, 2, 3, 1]), "label": tf.constant([0, 1, 2, 1])}
    trained = task.Task.Params(
        model=pipeline(fault, 2, "1f1b"),
        train=task.Train(
            optimizer=optim.Optimizer.Params(name="SGD", learning_rate=0.1), accumulate=2
        ),
    )
    specs = {name: tf.TensorSpec(v.shape, v.dtype) for name, v in good.items()}
    learned = learner.Learner(trained, specs)
    # The layer fails where the first feature is above 1: half of it is not.
    learned.pipe.by_path["words/table"].assign(tf.zeros([VOCABULARY, 4]))
    table = learned.pipe.by_path["words/table"]
    table.assign(tf.tensor_scatter_nd_update(table, [[6]], [[2.0] * 4]))
    bad = {**good, "word": tf.constant([1, 2, 6, 6])}
    batches = [good, good]
    batches[faulty] = bad
    before = {path: v.numpy() for path, v in learned.pipe.by_path.items()}
    with pytest.raises(errors.StepError, match=r"layer faulty, .*micro-batch 1 of 2"):
        learned.update(batches)
    # Nothing of a failed update is applied.
    for path, variable in learned.pipe.by_path.items():
        assert variable.numpy().tobytes() == before[path].tobytes(), path
    assert int(learned.step) == 0


def test_a_step_that_does_not_fail_again_says_so() -> None:
    pipe, batch = pipeline(FAULTS["label"], 2, "gpipe").instantiate(), mini_batch(FAULTS["forward"])
    pipe.build(batch)
    lost = tf.errors.UnavailableError(None, None, "the device was lost")
    explained = pipe.explain(lost, batch)
    assert str(explained).startswith("a step failed (the device was lost), but not when its slots")


class Nested(layers.Identity):
    """x → x; reads a row that is not there, in a function whose operations have no scope."""

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        del theta, ctx

        @tf.function(autograph=False, experimental_attributes={"_noinline": True})
        def read(x: tf.Tensor) -> tf.Tensor:
            missing = tf.cast(x[:, 0] > 1.0, tf.int32) * 99
            return tf.gather(x, missing)

        return read(inputs)


@pytest.mark.parametrize(
    ("schedule", "path"),
    [("gpipe", "value_and_gradients"), ("1f1b", "evaluate"), ("split", "tape")],
)
def test_a_layer_that_tensorflow_does_not_name_is_found(schedule: str, path: str) -> None:
    fault = Fault(lambda: stack(Nested.Params(name="nested")), 1, 1, ())
    with pytest.raises(errors.StepError, match=r"layer nested, .*indices\[0\] = 99 is not"):
        run(pipeline(fault, 3, schedule), mini_batch(fault), path)


class Counted(layers.Identity):
    """x → x; takes 20 ms and counts its calls."""

    calls = 0

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        del theta, ctx

        def count(value: Any) -> Any:
            Counted.calls += 1
            time.sleep(0.02)
            return value

        @tf.custom_gradient
        def counted(x: tf.Tensor) -> Any:
            y = tf.numpy_function(count, [x], x.dtype, stateful=False)
            return tf.ensure_shape(y, x.shape), lambda upstream: upstream

        return counted(inputs)


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core runs the first cell to its end first"
)
@pytest.mark.parametrize(("recompute", "training"), [("full", True), ("never", False)])
def test_cells_that_have_not_started_do_not_start_after_an_error(
    recompute: str, training: bool
) -> None:
    stacked = [
        Counted.Params(name="counted"),
        Faulty.Params(name="faulty"),
        layers.Softmax.Params(name="head", classes=CLASSES),
    ]
    pipe = pipelining.PipeliningLayer.Params(
        layers=stacked, num_partitions=2, cuts=(1, 2), num_micro_batches=20, recompute=recompute
    ).instantiate()
    batch = {"x": tf.fill([20, 3], 2.0), "label": tf.zeros([20], tf.int32)}
    pipe.build(batch)
    run = pipe.value_and_gradients if training else pipe.evaluate
    for _ in range(2):  # traced in the first
        Counted.calls = 0
        with pytest.raises(errors.StepError, match=r"layer faulty, .*micro-batch 0 of 20"):
            run(batch)
    # One or two beside the error, then as many to find its cause.
    assert Counted.calls < 10


# --- values that are not finite -------------------------------------------------------------------


class Poison(layers.Identity):
    """x → x; makes a value of the forward, or only the gradient, not finite."""

    class Params(layers.Identity.Params):
        where: Literal["forward", "gradient"] = hyperparams.field("forward", "Which pass.")

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        del theta, ctx
        # log 0 is -inf; √0 is 0, its derivative times 0 is NaN.
        zero = inputs * 0
        return inputs + (tf.math.log(zero) if self.params.where == "forward" else tf.sqrt(zero))


def test_first_nonfinite_names_the_layer_in_the_middle() -> None:
    own = pipelines.three(layers=pipelines.mlp(Poison.Params(name="spoiled")), cuts=None)
    assert own.first_nonfinite(pipelines.batch()) == "layer spoiled, output x, micro-batch 0"


def test_first_nonfinite_names_the_field_and_micro_batch() -> None:
    fields = pipelines.batch()
    fields["target"] = tf.tensor_scatter_nd_update(fields["target"], [[5, 1]], [np.inf])
    found = pipelines.three().first_nonfinite(fields)
    assert found == "field target of the mini-batch, micro-batch 2"


def test_first_nonfinite_names_the_layer_whose_gradient_it_is() -> None:
    own = pipelines.three(
        layers=pipelines.mlp(Poison.Params(name="spoiled", where="gradient")), cuts=None
    )
    assert np.isfinite(own.value_and_gradients(pipelines.batch()).loss)
    found = own.first_nonfinite(pipelines.batch())
    assert found.startswith("layer d2, gradient of d2/")  # the nearest weights before it


def test_first_nonfinite_names_a_weight() -> None:
    own = pipelines.three()
    own.build(pipelines.batch())
    kernel = own.by_path["d3/kernel"]
    kernel.assign(tf.tensor_scatter_nd_update(kernel, [[0, 0]], [np.nan]))
    assert own.first_nonfinite(pipelines.batch()) == "layer d3, variable d3/kernel"


def test_sound_values_are_looked_at_one_micro_batch_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[replica_pass.ReplicaPass] = []
    true = replica_pass.ReplicaPass.__post_init__

    def kept(self: replica_pass.ReplicaPass) -> None:
        true(self)
        runs.append(self)

    monkeypatch.setattr(replica_pass.ReplicaPass, "__post_init__", kept)
    assert pipelines.three().first_nonfinite(pipelines.batch()) == "nowhere"
    assert set(runs[0].values) == {3}


def test_first_nonfinite_names_a_loss_of_finite_values() -> None:
    fields = pipelines.batch()
    large = tf.fill(fields["target"].shape, tf.constant(1e200, fields["target"].dtype))
    found = pipelines.three().first_nonfinite({**fields, "target": large})
    assert found == "loss loss, micro-batch 0"
