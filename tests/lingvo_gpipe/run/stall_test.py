"""What a user reads while a step or an input does not end."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

from lingvo_gpipe import layers
from lingvo_gpipe.cluster import chief
from lingvo_gpipe.execution import monitoring
from lingvo_gpipe.input import Batch, Batches
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.run import loop, process
from tests.tiny_task import tiny_task

RELEASED = threading.Event()


class Stuck(layers.Identity):
    """x → x; waits until RELEASED in the second micro-batch of a step (or 20 s)."""

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        del theta
        return stuck(inputs) if ctx.training else inputs


CALLS: list[float] = []


@tf.custom_gradient
def stuck(x: tf.Tensor) -> Any:
    def wait(value: Any) -> Any:
        CALLS.append(time.monotonic())
        if len(CALLS) == 2:
            RELEASED.wait(20.0)
        return value

    y = tf.numpy_function(wait, [x], x.dtype, stateful=False)
    return tf.ensure_shape(y, x.shape), lambda upstream: upstream


def with_stuck_layer(**train: Any) -> Any:
    """Return a task of one step, whose layer `stuck` is in the second cell."""
    CALLS.clear()
    RELEASED.clear()
    params = tiny_task(max_steps=1, **train)
    head = params.model.layers[-1]
    params.model.layers = [*params.model.layers[:-1], Stuck.Params(name="stuck"), head]
    params.model.cuts = (3, 2)
    return params


def reported(lines: list[str], count: int) -> list[str]:
    """Wait until there are `count` lines."""
    deadline = time.monotonic() + 10
    while len(lines) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return list(lines)


def test_work_that_does_not_end_is_reported_less_and_less_often() -> None:
    lines: list[str] = []
    times: list[float] = []

    def describe() -> list[str]:
        times.append(time.monotonic())
        return ["why", "more"]

    dog = monitoring.Watchdog(0.2, describe, lines.append)
    with dog, dog.watching("step 7"):
        begun = time.monotonic()
        assert len(reported(lines, 4)) == 4
    assert re.match("step 7 has taken [0-2] s: why", lines[0])
    assert lines[1] == "    more"
    assert times[0] - begun >= 0.2
    assert times[1] - begun >= 0.4


def test_work_that_ends_in_time_is_not_reported() -> None:
    lines: list[str] = []
    dog = monitoring.Watchdog(0.8, lambda: ["why"], lines.append)

    def items() -> Iterator[int]:
        for item in range(20):
            time.sleep(0.05)
            yield item

    with dog:
        assert list(dog.each(items(), "item")) == list(range(20))
        for _ in range(20):
            with dog.watching("step"):
                time.sleep(0.05)
        time.sleep(1.0)  # nothing is being done
    assert lines == []


def test_a_device_that_cannot_be_read_is_reported() -> None:
    lines: list[str] = []

    def describe() -> list[str]:
        raise tf.errors.UnavailableError(None, None, "the worker is gone\nmore")

    dog = monitoring.Watchdog(0.1, describe, lines.append)
    with dog, dog.watching("step 7"):
        assert len(reported(lines, 1)) == 1
    why = "what its devices do is unknown: one cannot be read (the worker is gone)"
    assert re.fullmatch(f"step 7 has taken [0-2] s: {re.escape(why)}", lines[0])


def test_devices_that_do_not_answer_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "_DESCRIBED_WITHIN_S", 0.1)
    lines: list[str] = []
    ended = threading.Event()
    never = threading.Event()

    def describe() -> list[str]:
        never.wait(20.0)
        return ["late"]

    dog = monitoring.Watchdog(0.1, describe, lines.append, ended.set)
    with dog, dog.watching("step 7"):
        assert ended.wait(10.0)
    never.set()
    assert lines[0].endswith("what its devices do is unknown: one does not answer")


def test_the_slot_and_the_device_that_a_step_waits_for_are_named(tmp_path: Path) -> None:
    lines: list[str] = []
    params = with_stuck_layer(stall_after_s=0.5)

    def report(line: str) -> None:
        lines.append(line)
        # Where programs are traced for longer than a stall, that is reported first.
        if line.startswith("    device 1") and line.endswith("next 1F1"):
            RELEASED.set()

    result = loop.run(params, tmp_path, report=report)
    assert result.step == 1
    assert RELEASED.is_set()
    first = next(n for n, line in enumerate(lines) if "slot 1F1" in line)
    assert lines[first].startswith("step 0 has taken ")
    assert lines[first].endswith("it waits for slot 1F1 on device 1 (/device:CPU:1)")
    assert lines[first + 1 : first + 3] == [
        "    device 0 (/device:CPU:0): 2 of 4 calls returned, next 0B1",
        "    device 1 (/device:CPU:1): 1 of 3 calls returned, next 1F1",
    ]


def test_an_input_that_does_not_answer_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    read = Batches.__iter__

    def slow(batches: Batches) -> Iterator[Batch]:
        for batch in read(batches):
            time.sleep(1.5)
            yield batch

    monkeypatch.setattr(Batches, "__iter__", slow)
    loop.run(tiny_task(max_steps=1, stall_after_s=0.3), tmp_path, report=lines.append)
    assert re.fullmatch(
        r"reading the mini-batch of step 0 has taken [0-2] s: no slot has begun; its graph is "
        "being built, or its input is awaited",
        lines[0],
    )


def test_over_workers_a_stall_ends_the_chief_to_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    prepare = process.prepare_devices

    def prepare_then_connect(*arguments: Any) -> Any:
        prepared = prepare(*arguments)
        monkeypatch.setattr(chief, "current", mock.Mock())
        return prepared

    monkeypatch.setattr(process, "prepare_devices", prepare_then_connect)

    def report(line: str) -> None:
        lines.append(line)
        if line.startswith("the chief ends"):
            RELEASED.set()

    loop.run(with_stuck_layer(stall_after_s=0.4), tmp_path, report=report)
    assert codes[0] == os.EX_TEMPFAIL
    assert f"the chief ends, to be started again from {tmp_path / 'checkpoints'}" in lines
