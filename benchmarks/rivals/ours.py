"""A step of ours: K devices of one thread each.

`python -m benchmarks.rivals.ours KIND,POLICY REFERENCE [--cap=MIB]` prints one JSON object. POLICY
is full or never, by 1F1B with the automatic cut; or auto, which chooses what fits a device of that
many MiB, weights and gradients included, by measured times.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.rivals import measures
from benchmarks.support import blocks


def measure(configuration: str, path: Path, cap_mib: float | None) -> dict[str, Any]:
    """Return the seconds of a step, its peak memory and how far its gradients are from Keras's."""
    import tensorflow as tf

    from benchmarks import breakdown, speedup
    from benchmarks.plans import activations
    from benchmarks.rivals import plain
    from lingvo_gpipe import optim
    from lingvo_gpipe.execution import placement
    from lingvo_gpipe.plan import auto, step_plan

    placement.prepare_logical_cpus(blocks.K)
    placement.prepare_threads(blocks.K, blocks.K)
    kind, policy = configuration.split(",")
    known = measures.Reference.read(path)
    task, _ = breakdown.task_of(kind)
    task.model.slots_per_weight = 0.0
    task.train.optimizer = optim.Optimizer.Params(name="SGD", learning_rate=1e-4)
    x = tf.constant(known.batch["x"])
    batch = {"x": x, "target": tf.zeros_like(x)}
    specs = {name: tf.TensorSpec.from_tensor(value) for name, value in batch.items()}
    if policy == "auto":
        speedup.set_input(task, batch)
        task.model.set(schedule="auto", device_memory=f"{cap_mib}MiB")
        task = auto.resolved(task, lambda _: None, profile=True)
    else:
        task.model.set(schedule="1f1b", recompute=policy)
    resident = measures.Resident()
    pipe = task.model.instantiate()
    result = pipe.value_and_gradients(batch)
    gradients = {name: value.numpy() for name, value in result.gradients.items()}
    loss = float(result.loss)
    del result

    def step() -> None:
        float(pipe.value_and_gradients(batch).loss)

    planned = step_plan.make(task.model, specs)
    return {
        "loss": loss,
        "error": known.worst_error(gradients),
        "paths": list(gradients),
        "s": blocks.seconds(step),
        "resident_mib": resident.grown_mib(),
        "device_mib": activations.traced_peak_bytes(step) / blocks.K / measures.MIB,
        "weights_mib": sum(v.nbytes for v in known.weights.values()) / blocks.K / measures.MIB,
        "planned_mib": planned.heaviest_bytes / measures.MIB,
        "product_s": measures.product_s(plain.product(blocks.K)),
        "chosen": f"{task.model.schedule}, {task.model.recompute}, cuts {pipe.analysis.cuts}",
    }


def main() -> None:
    """Measure one configuration and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configuration", help="KIND,POLICY")
    parser.add_argument("reference", type=Path, help="file of benchmarks.rivals.plain")
    parser.add_argument("--cap", type=float, help="MiB of a device")
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    print(json.dumps(measure(options.configuration, options.reference, options.cap)))


if __name__ == "__main__":
    main()
