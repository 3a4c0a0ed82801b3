"""Our side: the reference, and a step on K devices of one thread each.

`python -m benchmarks.rivals.ours KIND,WHAT FILE` prints one JSON object. WHAT is reference, which
writes FILE; or a recompute policy, for a step of 1F1B with the automatic cut.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.rivals.reference import MIB, Reference
from benchmarks.support import networks


def write_reference(kind: str, path: Path) -> None:
    """Write the first weights of the uncut network, its loss and its gradients."""
    from lingvo_gpipe import pipelining

    layers, batch = networks.blocks(kind)
    pipe = pipelining.PipeliningLayer.Params(layers=layers, recompute="never").instantiate()
    result = pipe.value_and_gradients(batch)
    Reference(
        loss=float(result.loss),
        batch={"x": batch["x"].numpy()},
        weights={path: weight.numpy() for path, weight in pipe.weights.items()},
        gradients={path: value.numpy() for path, value in result.gradients.items()},
    ).write(path)


def measure(kind: str, policy: str, path: Path) -> dict[str, Any]:
    """Return the seconds of a step, its peak of tensors, and how far its gradients are off."""
    from benchmarks.support import tensor_bytes
    from lingvo_gpipe import pipelining
    from lingvo_gpipe.execution import placement

    placement.prepare_logical_cpus(networks.K)
    placement.prepare_threads(networks.K, networks.K)
    reference = Reference.read(path)
    layers, batch = networks.blocks(kind)
    pipe = pipelining.PipeliningLayer.Params(
        layers=layers,
        num_partitions=networks.K,
        num_micro_batches=networks.M,
        schedule="1f1b",
        recompute=policy,
    ).instantiate()
    result = pipe.value_and_gradients(batch)
    gradients = {name: value.numpy() for name, value in result.gradients.items()}
    loss = float(result.loss)
    del result

    def step() -> None:
        float(pipe.value_and_gradients(batch).loss)

    return {
        "loss": loss,
        "error": reference.worst_error(gradients),
        "paths": list(gradients),
        "s": networks.step_s(step),
        "device_mib": tensor_bytes.peak(step) / networks.K / MIB,
    }


def main() -> None:
    """Do one of the two, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configuration", help="KIND,WHAT")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    kind, what = options.configuration.split(",")
    result: dict[str, Any] = {}
    if what == "reference":
        write_reference(kind, options.file)
    else:
        result = measure(kind, what, options.file)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
