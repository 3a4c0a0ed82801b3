"""Does the largest Transformer that `plan --fit` says fits the card train, and a larger one not?

The paper's Table 1 on one card: Transformer-L in float32 by RMSProp, rows of 1,024 ids. "Naive"
keeps everything of a mini-batch, "pipeline" recomputes each of its micro-batches; the paper's ratio
of their sizes is 2.7, on 8 GB. Layers are twice as wide as the paper's and mini-batches a quarter
as large, since the first update takes as long as the graph is large. A model of a tenth more layers
must fail with the line that names the device and what the plan expects there.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import tensorflow as tf

from benchmarks.accelerator.question import MIB, Answers, Setting, attempt, usable_mib
from lingvo_gpipe import errors, registry
from lingvo_gpipe import task as tasks
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.plan import largest
from lingvo_gpipe.run import learner
from lingvo_gpipe.tasks.lm import transformer

MODELS = {"pipeline": "lm.transformer.L13", "naive": "lm.transformer.L3"}
UPDATES = 3
_TOY_BYTES = 90_000
_SHARES = (1.0, 0.95, 0.9)  # of the memory, tried one after the other


def answers(setting: Setting) -> Answers:
    """Yield the largest model of each kind, its updates, and how the larger one fails."""
    (device,) = setting.devices(1)
    limit_bytes = _TOY_BYTES if setting.cpu else usable_mib() * MIB
    parameters = {}
    for kind in MODELS:
        for share in _SHARES:
            member = attempt(_largest, setting, kind, int(share * limit_bytes))
            yield f"{kind}, plan --fit of {share:.0%}", member
            if "error" in member:
                break
            trained = attempt(_train, setting, kind, member["layers"], device)
            yield f"{kind}, {UPDATES} updates in {share:.0%}", trained
            if "error" not in trained:
                parameters[kind] = member["parameters"]
                larger = -(-11 * member["layers"] // 10)
                yield f"{kind}, {larger} layers", attempt(_line, setting, kind, larger, device)
                break
    if len(parameters) == len(MODELS):
        yield "pipeline of naive", parameters["pipeline"] / parameters["naive"]


def _task(setting: Setting, kind: str, num_layers: int) -> tasks.Task.Params:
    """Return the task of a model, with synthetic ids."""
    task: tasks.Task.Params = registry.Registry().model(MODELS[kind])().task()
    units, heads, vocabulary = setting.sized((8, 2, 50), (4096, 32, 32_000))
    task.model.layers = transformer.language_model(
        num_layers, units=units, heads=heads, hidden=4 * units, vocabulary=vocabulary
    )
    rows, length = setting.sized((4, 8), (8, 1024))
    task.model.num_micro_batches = min(rows, task.model.num_micro_batches)
    task.input.set(batch_size=rows, length=length)
    return synthetic.task(task)


def _largest(setting: Setting, kind: str, limit_bytes: int) -> dict[str, Any]:
    """Return the largest model that fits by the plan."""
    member = largest.find(lambda value: _task(setting, kind, value), 1, limit_bytes)
    if member.value is None or member.plan is None:
        raise ValueError(f"not even one layer fits {limit_bytes} bytes: {member.refusal}")
    planned_mib = member.plan.heaviest_bytes / MIB
    return {
        "layers": member.value,
        "parameters": member.plan.parameters,
        "planned MiB": planned_mib,
    }


def _train(setting: Setting, kind: str, num_layers: int, device: str) -> dict[str, Any]:
    """Return the losses and seconds of some updates, and the peak of memory."""
    gc.collect()
    task = _task(setting, kind, num_layers)
    source = task.input.instantiate()
    updates = learner.Learner(task, source.element_spec(training=True))
    setting.reset_peaks([device])
    losses, seconds = [], []
    for _, batch in zip(range(UPDATES), source.batches(0), strict=False):
        begun_s = time.perf_counter()
        losses.append(float(updates.update([batch]).loss))
        seconds.append(time.perf_counter() - begun_s)
    (counted,) = setting.counted_mib([device])
    return {"losses": losses, "seconds": seconds, "counted MiB": counted}


def _line(setting: Setting, kind: str, num_layers: int, device: str) -> dict[str, Any]:
    """Return how a model that does not fit fails; on CPUs, which have no limit, it trains."""
    try:
        return {"trained": _train(setting, kind, num_layers, device)}
    except (errors.StepError, tf.errors.ResourceExhaustedError) as error:
        is_planned = isinstance(error, errors.StepError) and " on device 0" in str(error)
        return {"names the device": is_planned, "line": str(error).splitlines()[0][:500]}
