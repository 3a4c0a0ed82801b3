"""How much faster are two devices of one thread each than one, on the same calls?

`python -m benchmarks.speedup`: K=2, M=32, full recomputation, MLP, Transformer and convolution
blocks. "One" is a process with one thread that runs the very same programs; "two" has two logical
CPU devices and a thread for each. Five interleaved rounds; other load on the machine is sampled and
shown. A second table: the last cell fused and not (1F1B), each with the cut that suits it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

ROUNDS = 5


def measure(configuration: str) -> dict[str, Any]:
    """Return seconds per step of `kind,schedule,fused|apart,one|two`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    kind, schedule, fuse, devices = configuration.split(",")
    import tensorflow as tf

    from benchmarks.support import blocks
    from lingvo_gpipe import pipelining
    from lingvo_gpipe.execution import placement

    placement.prepare_logical_cpus(blocks.K)
    tf.config.threading.set_inter_op_parallelism_threads(1 if devices == "one" else 2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # In the second table the cut is free to move, so its cells are made of more, lighter layers.
    free = schedule == "1f1b"
    layers, batch = blocks.network(kind, 2 * blocks.K if free else blocks.K)
    half = (len(layers) - 1) // 2
    pipe = pipelining.PipeliningLayer.Params(
        layers=layers,
        num_partitions=blocks.K,
        num_micro_batches=blocks.M,
        schedule=schedule,
        fuse=fuse == "fused",
        cuts=None if free else (half, len(layers) - half),
        devices=("/device:CPU:0", "/device:CPU:0" if devices == "one" else "/device:CPU:1"),
    ).instantiate()
    time_s = blocks.seconds(lambda: float(pipe.value_and_gradients(batch).loss))
    return {"s": time_s, "cuts": pipe.analysis.cuts}


def main() -> None:
    """Run every configuration in processes of their own and print two tables."""
    if len(sys.argv) == 2:
        print(json.dumps(measure(sys.argv[1])))
        return
    from benchmarks.support import blocks, machine, processes

    print(machine.describe())
    bound = blocks.M * blocks.K / (blocks.M + blocks.K - 1)
    print(f"K={blocks.K}, M={blocks.M}; bound of the schedule {bound:.2f}")
    names = [f"{kind},gpipe,apart,{d}" for kind in blocks.KINDS for d in ("one", "two")]
    found = processes.rounds("benchmarks.speedup", names, ROUNDS)
    print(f"{'cells':<12} {'one s':>7} {'two s':>7} {'ratio':>6}  spread of the ratio  other load")
    for kind in blocks.KINDS:
        one, two = found[f"{kind},gpipe,apart,one"], found[f"{kind},gpipe,apart,two"]
        ratios = [{"r": a["s"] / b["s"]} for a, b in zip(one, two, strict=True)]
        load = max(run["other_load"] for run in one + two)
        print(
            f"{kind:<12} {processes.median(one, 's'):7.3f} {processes.median(two, 's'):7.3f} "
            f"{processes.median(ratios, 'r'):6.2f}  {processes.spread(ratios, 'r')}      {load:.2f}"
        )
    names = [f"{kind},1f1b,{fuse},two" for kind in blocks.KINDS for fuse in ("apart", "fused")]
    found = processes.rounds("benchmarks.speedup", names, ROUNDS)
    print("\n1F1B, two devices, twice the layers: the last cell's forward and backward")
    print(f"{'cells':<12} {'apart s':>8} {'cut':>9} {'fused s':>8} {'cut':>9} {'gain':>6}  load")
    for kind in blocks.KINDS:
        apart, fused = found[f"{kind},1f1b,apart,two"], found[f"{kind},1f1b,fused,two"]
        gain = 1 - processes.median(fused, "s") / processes.median(apart, "s")
        load = max(run["other_load"] for run in apart + fused)
        print(
            f"{kind:<12} {processes.median(apart, 's'):8.3f} {apart[0]['cuts']!s:>9} "
            f"{processes.median(fused, 's'):8.3f} {fused[0]['cuts']!s:>9} {gain:6.1%}  {load:.2f}"
        )


if __name__ == "__main__":
    main()
