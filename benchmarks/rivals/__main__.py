"""Is a step of ours shorter than one of PyTorch's pipelining, and than one of plain Keras?

`make bench-setup`, then `python -m benchmarks.rivals [--quick] [--only=KIND,...]`: the blocks of
`benchmarks.support.blocks`, K=2, M=32, the same mini-batch and first weights. PyTorch: GPipe and
1F1B, everything kept or each stage checkpointed, two pinned processes of one thread, gloo over
loopback. Ours: 1F1B with `full` and `never`, two devices of one thread each, and `auto` by measured
times within a cap of memory. Keras: the whole mini-batch on one device of one thread. Steps compute
loss and gradients, without an update. Each is compared with Keras by its loss and all gradients;
one that differs by more than float32 rounds ends the benchmark. "Device" is the most that tensors
of a step hold at once: of PyTorch on the device that needs most, of ours, whose devices share an
allocator, divided by K; by its plan the heaviest device of `auto` is within the cap.

The cap of a device lies half-way between what PyTorch's GPipe needs with checkpointing and without:
tensors of a step, receiving buffers included, and the weights. GPipe must checkpoint under it; 1F1B
need not, since with K=2 it keeps two micro-batches. "Product" is the share of a step that its FLOPs
would take at the rate of a 1,024² matrix product, measured beside the step on as many devices at
once, in the milliseconds beside it: the libraries multiply at different rates. "Resident" is the
growth of all processes from before the model was made: TensorFlow's has the traced graphs in it,
PyTorch's what its allocator keeps; that of `auto` leaves out what its measurements left resident.

For the MLP also K=1, M=1 against the plain step, 512 rows, one thread, turn by turn.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.rivals import measures
from benchmarks.support import blocks, machine, processes

ROUNDS, QUICK_ROUNDS = 3, 1
AIM, AIM_SINGLE = 1.5, 0.03
PYTHON = Path(__file__).parents[2] / ".venv-bench/bin/python"
TORCH = tuple(f"{s},{p}" for s in ("gpipe", "1f1b") for p in ("kept", "checkpointed"))
OURS = ("full", "never", "auto")
_PLAIN, _SINGLE = "keras", "single"


def cap_mib(runs: Mapping[str, list[Any]], reference: measures.Reference) -> float:
    """Return the cap of a device: half-way between PyTorch's GPipe with checkpointing and without.

    Args:
        runs: configuration → its runs so far.
        reference: whose weights count, divided by K.
    """
    needed = (runs[f"gpipe,{policy}"][-1]["device_mib"] for policy in ("kept", "checkpointed"))
    weights = sum(value.nbytes for value in reference.weights.values()) / measures.MIB
    return statistics.fmean(needed) + weights / blocks.K


def measure(kind: str, count: int) -> tuple[dict[str, list[Any]], float, float]:
    """Return the runs of each rival, the cap of a device in MiB, and the FLOPs of a step."""
    names = [*TORCH, *OURS, _PLAIN, *([_SINGLE] if kind == "mlp" else [])]
    found: dict[str, list[Any]] = {name: [] for name in names}
    cap = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{kind}.npz"
        processes.run(["benchmarks.rivals.plain", kind, "reference", str(path)])
        known = measures.Reference.read(path)
        for number in range(count):
            for name in names:
                if name in TORCH:
                    arguments = ["benchmarks.rivals.pytorch", f"{kind},{name}", str(path)]
                    run = processes.run(arguments, str(PYTHON))
                elif name in OURS:
                    arguments = ["benchmarks.rivals.ours", f"{kind},{name}", str(path)]
                    run = processes.run([*arguments, f"--cap={cap:.2f}"])
                else:
                    what = "step" if name == _PLAIN else "single"
                    run = processes.run(["benchmarks.rivals.plain", kind, what, str(path)])
                found[name].append(run)
                if name != _SINGLE:
                    known.check(f"{kind}, {name}", run)
                if number == 0 and name == TORCH[-1]:
                    cap = cap_mib(found, known)
    return found, cap, known.flops


def best(found: Mapping[str, list[Any]], cap: float, weights_mib: float) -> str:
    """Return PyTorch's fastest configuration that fits a device.

    Args:
        found: configuration → its runs.
        cap: MiB of a device.
        weights_mib: those of a device.
    """
    fitting = [
        name for name in TORCH if processes.median(found[name], "device_mib") + weights_mib <= cap
    ]
    return min(fitting, key=lambda name: processes.median(processes.quiet(found[name]), "s"))


def print_kind(kind: str, found: Mapping[str, list[Any]], flops: float) -> None:
    """Print a row for each rival."""
    print(
        f"\n{kind:<20} {'s':>7} {'product':>8} {'ms':>6} {'device MiB':>11} {'resident MiB':>13} "
        f"{'error':>8}  spread of s"
    )
    for name in (*TORCH, *OURS, _PLAIN):
        runs = processes.quiet(found[name])
        devices = 1 if name == _PLAIN else blocks.K
        shares = [
            {"share": flops / devices / run["s"] * run["product_s"] / (2 * measures.SIDE**3)}
            for run in runs
        ]
        held = f"{processes.median(runs, 'device_mib'):.1f}" if name != _PLAIN else "-"
        print(
            f"{name:<20} {processes.median(runs, 's'):7.3f} "
            f"{processes.median(shares, 'share'):8.2f} "
            f"{1e3 * processes.median(runs, 'product_s'):6.1f} {held:>11} "
            f"{processes.median(runs, 'resident_mib'):13.0f} {runs[0]['error']:8.0e}  "
            f"{processes.spread(runs, 's')}"
        )


def main() -> None:
    """Run every rival in processes of its own and print tables."""
    parser = processes.parser(__doc__, measures=False)
    parser.add_argument("--only", default=",".join(blocks.KINDS), help="kinds between commas")
    options = parser.parse_args()
    kinds = options.only.split(",")
    if unknown := sorted(set(kinds) - set(blocks.KINDS)):
        parser.error(f"--only={unknown[0]}: the kinds are {', '.join(blocks.KINDS)}")
    if not PYTHON.exists():
        sys.exit("benchmarks.rivals needs PyTorch in .venv-bench. Run make bench-setup")
    count = QUICK_ROUNDS if options.quick else ROUNDS
    print(machine.describe())
    print(f"K={blocks.K}, M={blocks.M}; medians of {count} rounds")
    everything: dict[str, list[Any]] = {}
    figures = []
    for kind in kinds:
        found, cap, flops = measure(kind, count)
        everything.update({f"{kind},{name}": runs for name, runs in found.items()})
        print_kind(kind, found, flops)
        rival = best(found, cap, found["auto"][0]["weights_mib"])
        ours, theirs = (processes.quiet(found[name]) for name in ("auto", rival))
        ratio = processes.median(theirs, "s") / processes.median(ours, "s")
        print(
            f"cap {cap:.1f} MiB a device: PyTorch's best is {rival}, auto takes "
            f"{ours[0]['chosen']} (planned {ours[0]['planned_mib']:.1f} MiB); "
            f"PyTorch takes {ratio:.2f} times as long"
        )
        figures.append(f"{kind} {ratio:.2f}")
        if kind == "mlp":
            runs = processes.quiet(found[_SINGLE])
            shares = ", ".join(
                f"{name} {processes.median(runs, f'{name}_share'):.2f}"
                for name in ("plain", "kept", "fused")
            )
            print(
                f"K=1, M=1 over the plain step: kept {processes.spread(runs, 'kept')}, fused "
                f"{processes.spread(runs, 'fused')}; shares of the product's rate: {shares}"
            )
            over = processes.median(runs, "kept")
            print(f"single: {over:.1%} over the plain step (aim at most {AIM_SINGLE:.0%})")
    processes.conclude("rivals", ", ".join(figures), f"at least {AIM}", everything)


if __name__ == "__main__":
    main()
