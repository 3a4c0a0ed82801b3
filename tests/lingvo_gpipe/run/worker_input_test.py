"""Mini-batches that a worker reads are those that the chief would read, and so are its errors.

The worker's function is registered in the process of the tests; `hub_test` and `workers_test` have
it in processes of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, task
from lingvo_gpipe.input import Batch, Batches, InMemory, Input
from lingvo_gpipe.network.parts import InParts, ReplicaPart
from lingvo_gpipe.run import loop
from lingvo_gpipe.run.worker import Requests, register
from lingvo_gpipe.run.worker_input import WorkerInput
from tests.tiny_task import one_layer_task

hyperparams.register_package(__name__)

DEVICE = "CPU:0"
NAMED = f"worker 0 ({socket.gethostname()}), which reads the input: "


class Counted(Batches):
    """Counts one replaced example in each mini-batch."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            self.counts["replaced"] = self.counts.get("replaced", 0) + 1
            yield batch


class Stored(InMemory):
    """Rows of a file: example i holds i in every field."""

    class Params(InMemory.Params):
        """Params of Stored."""

        data_dir: str = hyperparams.required("Folder of the file.")
        unreadable: int = hyperparams.field(-1, "Number of an example that cannot be read.")
        is_broken: bool = hyperparams.field(False, "Its data cannot be read.")

    params: Params
    asset_names = ("names.txt",)

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        return {
            "x": tf.TensorSpec([2]),
            "id": tf.TensorSpec([], tf.int32),
            "name": tf.TensorSpec([], tf.string),
            "half": tf.TensorSpec([], tf.bfloat16),
            "flag": tf.TensorSpec([], tf.bool),
        }

    def arrays(self) -> Mapping[str, Mapping[str, np.ndarray[Any, Any]]]:
        if self.params.is_broken:
            raise ZeroDivisionError("in the input")
        ids = np.load(Path(self.params.data_dir, "ids.npy"))
        fields = {
            "x": np.stack([ids, -ids], 1).astype(np.float32),
            "id": ids,
            "name": np.array([f"é{i}".encode() for i in ids], object),
            "half": ids.astype(tf.bfloat16.as_numpy_dtype),
            "flag": ids % 2 == 0,
        }
        return {"train": fields, "test": {name: array[:5] for name, array in fields.items()}}

    def read(
        self, rows: tf.data.Dataset, split: str, batch_size: int, seed: int | None
    ) -> tf.data.Dataset:
        def check(batch: Batch) -> Batch:
            with tf.control_dependencies(
                [tf.debugging.assert_none_equal(batch["id"], self.params.unreadable)]
            ):
                changed = {"x": tf.identity(batch["x"])}
            return {**batch, **changed, "more": batch["x"]}

        return super().read(rows, split, batch_size, seed).map(check)

    def training(self, seed: int, position: int, places: range) -> Batches:
        return Counted(super().training(seed, position, places).dataset, first=position)

    def evaluation(self, split: str, batch_size: int | None = None) -> Batches:
        return Counted(super().evaluation(split, batch_size).dataset)

    def assets(self) -> dict[str, bytes]:
        return {"names.txt": Path(self.params.data_dir, "names.txt").read_bytes()}


@pytest.fixture(scope="module")
def token() -> Iterator[str]:
    """Return the name of a worker's function in this process."""
    token, registered = register(Requests())
    yield token
    del registered


def write(folder: Path, count: int = 11, names: str = "a") -> Path:
    np.save(folder / "ids.npy", np.arange(count, dtype=np.int32))
    (folder / "names.txt").write_text(names)
    return folder


def pair(folder: Path, token: str, **more: Any) -> tuple[Stored, WorkerInput]:
    """Return an input in this process, and the same one of the worker."""
    params = Stored.Params(batch_size=4, data_dir=str(folder), on_worker=True, **more)
    own: Stored = params.instantiate()
    return own, WorkerInput(own, [DEVICE], token=token)


def arrays(
    batches: Iterable[Mapping[str, Any]], names: Iterable[str], count: int | None = None
) -> list[Any]:
    """Return the fields of mini-batches as (dtype, shape, bytes), which differ if a bit does."""
    found = []
    for batch in itertools.islice(batches, count):
        each = {name: (value.dtype, value.numpy()) for name, value in batch.items()}
        found.append(
            {name: (each[name][0], each[name][1].shape, each[name][1].tolist()) for name in names}
        )
    return found


def test_a_worker_reads_the_same_mini_batches(tmp_path: Path, token: str) -> None:
    own, worker = pair(write(tmp_path), token)
    names = own.example_spec()
    for position in (0, 7):
        theirs = worker.batches(5, position)
        expected = arrays(own.batches(5, position), names, 4)
        assert arrays(theirs, names, 4) == expected
        assert set(next(iter(theirs))) == set(names)  # and no field that nobody declared
        assert arrays(theirs, names, 4) == expected  # from its beginning, for each loop
        assert theirs.counts == {"replaced": 4}
    evaluated = worker.evaluation("test")
    assert arrays(evaluated, names) == arrays(own.evaluation("test"), names)
    assert [each["id"][1] for each in arrays(evaluated, names)] == [(4,), (1,)]


def test_training_goes_on_where_an_evaluation_came_between(tmp_path: Path, token: str) -> None:
    own, worker = pair(write(tmp_path), token)
    training = iter(worker.batches(1))
    found = arrays(training, ["id"], 2)
    assert len(arrays(worker.evaluation("test"), ["id"], 1)) == 1  # which is not read to its end
    assert len(arrays(worker.evaluation("test"), ["id"])) == 2
    assert found + arrays(training, ["id"], 2) == arrays(own.batches(1), ["id"], 4)


def test_two_loops_at_a_time_are_refused(tmp_path: Path, token: str) -> None:
    _, worker = pair(write(tmp_path), token)
    batches = worker.batches(1)
    first = iter(batches)
    next(first)
    next(iter(batches))
    with pytest.raises(errors.InputError, match="of training were begun again meanwhile"):
        next(first)


def refusal(worker: WorkerInput, kind: type[Exception] = errors.InputError) -> str:
    with pytest.raises(kind) as caught:
        next(iter(worker.batches(1)))
    return str(caught.value)


def test_an_unreadable_mini_batch_is_named_with_the_worker(tmp_path: Path, token: str) -> None:
    own, worker = pair(write(tmp_path), token, unreadable=9, shuffle=False)
    batches = iter(worker.batches(1))
    assert len(arrays(batches, ["id"], 2)) == 2
    with pytest.raises(errors.InputError) as caught:
        next(batches)
    with pytest.raises(errors.InputError) as expected:
        list(itertools.islice(own.batches(1), 3))
    assert str(caught.value) == NAMED + str(expected.value)
    assert "mini-batch 2 cannot be read: " in str(expected.value)


def test_data_that_a_worker_lacks_is_named_with_the_worker(
    tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, worker = pair(write(tmp_path), token)
    kept = own.arrays()
    monkeypatch.setattr(own, "arrays", lambda: kept)
    (tmp_path / "ids.npy").unlink()
    assert refusal(worker) == (
        f"{NAMED}{tmp_path}/ids.npy: No such file or directory. Put the data there, under the "
        "same path"
    )


def test_other_data_on_the_worker_is_refused(
    tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, worker = pair(write(tmp_path), token)
    expected = own.fingerprint()
    monkeypatch.setattr(own, "fingerprint", lambda _: expected)
    theirs = f"sha256 {hashlib.sha256(b'b').hexdigest()[:16]}"
    for count, names, text in (
        (10, "a", "number of examples in split 'train' is 10, the chief's 11. Copy the same data"),
        (11, "b", f"names.txt is {theirs}, the chief's {expected['names.txt']}. Copy the same"),
    ):
        write(tmp_path, count, names)
        assert refusal(worker).startswith(f"{NAMED}other data than the chief's: {text}")


def test_an_input_that_cannot_be_imported_is_named(
    tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, worker = pair(write(tmp_path), token)
    monkeypatch.setattr(type(own.params), "to_text", lambda _: "class: my_data.Mine\n")
    text = refusal(worker, errors.ParamsError)
    assert text.startswith(f"{NAMED}")
    assert "'my_data.Mine' is not in a registered package" in text


def test_a_bug_keeps_its_traceback(
    tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, worker = pair(write(tmp_path), token, is_broken=True)
    monkeypatch.setattr(own, "fingerprint", lambda _: {})
    text = refusal(worker, RuntimeError)
    assert text.startswith(f"{NAMED}ZeroDivisionError: in the input\nTraceback (most recent call")
    assert "in arrays" in text


def test_without_workers_a_line_says_that_the_setting_does_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    params = one_layer_task(max_steps=1)
    params.input.on_worker = True
    loop.run(params, tmp_path, evaluate=True, report=lines.append)
    note = "input.on_worker does nothing in this run, which has no workers"
    assert [line for line in lines if "on_worker" in line] == [note]


def test_a_resumed_run_may_change_who_reads() -> None:
    before = one_layer_task()
    after = before.copy()
    after.input.on_worker = True
    assert task.change(before.to_text(), after.to_text()).refused == ()


class Ragged(Stored):
    """Examples whose spec has no known size, so that a mini-batch may be padded to its longest."""

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        return {**super().example_spec(), "x": tf.TensorSpec([None])}


def in_parts(own: Input, token: str, num_replicas: int, num_micro_batches: int) -> WorkerInput:
    """Return an input that a worker reads for each replica."""
    of_replicas = [
        ReplicaPart(replica, num_replicas, num_micro_batches) for replica in range(num_replicas)
    ]
    return WorkerInput(own, [DEVICE] * num_replicas, of_replicas, token)


@pytest.mark.parametrize("kind", [Stored, Ragged])
def test_parts_have_each_example_once(
    tmp_path: Path, token: str, kind: type[Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 7 micro-batches of 11 examples, replicas have 3, 2 and 2: 6, 3 and 2 examples."""
    params = kind.Params(batch_size=11, eval_batch_size=9, data_dir=str(write(tmp_path, 20)))
    own: Stored = params.instantiate()
    names = list(own.example_spec())
    read = in_parts(own, token, 3, 7)
    theirs = read.batches(5, 2)
    assert arrays(theirs, names, 3) == arrays(own.batches(5, 2), names, 3)
    batch = next(iter(theirs))
    assert isinstance(batch, InParts)
    assert [len(part["x"]) for part in batch.parts] == [6, 3, 2]
    assert theirs.counts == {"replaced": 3 if kind is Stored else 1}  # of one mini-batch
    evaluated = read.evaluation("test")
    assert arrays(evaluated, names) == arrays(own.evaluation("test"), names)
    one_example: Stored = kind.Params(batch_size=4, data_dir=params.data_dir).instantiate()
    read_by_four = in_parts(one_example, token, 3, 4).evaluation("test")
    assert [isinstance(b, InParts) and len(b.parts) for b in read_by_four] == [
        3,
        1,
    ]  # of the last mini-batch's one example, two replicas have none

    plain = ReplicaPart.examples
    monkeypatch.setattr(ReplicaPart, "examples", lambda self, size: plain(self, size)[:-1])
    with pytest.raises(errors.InputError, match="do not read the same mini-batches"):
        next(iter(read.batches(5)))


def test_a_worker_reads_only_its_part(tmp_path: Path, token: str) -> None:
    """Of examples 8, 9, 10 and 0, the second replica has the last two."""
    own, _ = pair(write(tmp_path), token, unreadable=9, shuffle=False)
    read = in_parts(own, token, 2, 2)
    with pytest.raises(errors.InputError, match="mini-batch 2 cannot be read"):
        next(iter(read.batches(1, 2)))
    second = own.part(ReplicaPart(1, 2, 2), 1, 2)
    assert arrays(second, ["id"], 1) == [{"id": (tf.int32, (2,), [10, 0])}]


@pytest.mark.parametrize("differ", ["left out", "length"])
def test_copies_that_differ_are_refused(
    tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch, differ: str
) -> None:
    """In evaluation, examples that are left out move those after them."""
    own, _ = pair(write(tmp_path), token)
    numbers = iter([0, 1])
    evaluation = Stored.evaluation

    def other(self: Stored, split: str, batch_size: int | None = None) -> Batches:
        dataset, number = evaluation(self, split, batch_size).dataset, next(numbers)
        batches = Batches(dataset if differ == "left out" else dataset.take(5 - 5 * number))
        if differ == "left out":
            batches.counts["left_out"] = number
        return batches

    monkeypatch.setattr(Stored, "evaluation", other)
    host = f"worker 0 ({socket.gethostname()}), which reads the input"
    first, second = {
        "left out": ("0 examples left_out", "1 examples left_out"),
        "length": ("goes on", "ended"),
    }[differ]
    with pytest.raises(errors.InputError) as caught:
        next(iter(in_parts(own, token, 2, 2).evaluation("test")))
    assert str(caught.value) == (
        f"the workers do not read the same mini-batches ({host}: {first}; {host}: {second}). Copy "
        "the same data to all hosts, or set input.on_worker=False"
    )
