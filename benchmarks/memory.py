"""How much memory does a step take: recomputed and kept, GPipe and 1F1B?

`python -m benchmarks.memory [--quick]`: peak bytes (VmHWM) over what was resident before the first
step, on logical CPU devices, each configuration in a process of its own since freed memory is not
returned. Beside it the bytes by formula: recomputed, each device O(N + L/K · N/M), its cell's
inputs and one micro-batch inside it, where no more devices work at once than there are cores; kept,
O(L · N).
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.support import processes

L, WIDTH, ROWS = 16, 1024, 8192
KEPT = 6  # tensors of x's shape that a block keeps: gelu alone four
MIB = 2**20
CONFIGURATIONS = {  # text → K, M, schedule, recompute
    "recomputed, K=4, M=8": (4, 8, "gpipe", "full"),
    "kept, K=4, M=8": (4, 8, "gpipe", "never"),
    "kept, K=1, M=1 (plain)": (1, 1, "gpipe", "never"),
    "GPipe, K=4, M=16": (4, 16, "gpipe", "full"),
    "1F1B, K=4, M=16": (4, 16, "1f1b", "full"),
}


def measure(configuration: str) -> dict[str, Any]:
    """Return the peak bytes of two steps over the state before the first."""
    num_partitions, num_micro_batches, schedule, recompute = CONFIGURATIONS[configuration]
    import tensorflow as tf

    from lingvo_gpipe import layers, pipelining
    from lingvo_gpipe.execution import placement

    placement.prepare_logical_cpus(num_partitions)
    block = layers.Residual.Params(
        body=[layers.Dense.Params(units=WIDTH, activation="gelu", use_bias=False)]
    )
    pipe = pipelining.PipeliningLayer.Params(
        layers=[block] * L + [layers.MeanSquaredError.Params()],
        num_partitions=num_partitions,
        num_micro_batches=num_micro_batches,
        schedule=schedule,
        recompute=recompute,
        cuts=None if num_partitions == 1 else (4, 4, 4, 5),
    ).instantiate()
    x = tf.random.stateless_normal([ROWS, WIDTH], [1, 2])
    batch = {"x": x, "target": tf.zeros_like(x)}
    pipe.build(batch)
    before = status("VmRSS")
    for _ in range(2):
        float(pipe.value_and_gradients(batch).loss)
    return {"mib": (status("VmHWM") - before) / MIB}


def status(name: str) -> int:
    """Return a figure of this process in bytes, as the kernel keeps it."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    raise LookupError(name)


def formula_mib(configuration: str) -> float:
    """Return the activations by formula, all devices together, in MiB; gradients included."""
    num_cells, num_micro_batches, schedule, recompute = CONFIGURATIONS[configuration]
    whole = ROWS * WIDTH * 4 / MIB  # N
    gradients = L * WIDTH * WIDTH * 4 / MIB
    inside = KEPT * whole
    if recompute == "never":
        return L * inside + gradients
    live = [
        min(num_cells - k, num_micro_batches) if schedule == "1f1b" else num_micro_batches
        for k in range(num_cells)
    ]
    boundary = whole * sum(live) / num_micro_batches
    working = min(num_cells, os.cpu_count() or 1) / num_cells
    return boundary + working * L * inside / num_micro_batches + gradients


def main() -> None:
    """Measure every configuration and print a table."""
    options = processes.parser(__doc__).parse_args()
    runs = processes.measured(options, "benchmarks.memory", list(CONFIGURATIONS), measure)
    print(
        f"{L} blocks gelu(xW) + x, x [{ROWS}, {WIDTH}] float32 = {ROWS * WIDTH * 4 / MIB:.0f} MiB"
    )
    print(f"{'':<24} {'peak MiB':>9}  {'formula MiB':>11}  spread")
    for name in CONFIGURATIONS:
        print(
            f"{name:<24} {processes.median(runs[name], 'mib'):9.0f}  {formula_mib(name):11.0f}  "
            f"{processes.spread(runs[name], 'mib')}"
        )


if __name__ == "__main__":
    main()
