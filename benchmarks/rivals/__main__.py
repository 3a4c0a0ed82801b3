"""Is a step of ours shorter than one of PyTorch's pipelining?

`make bench-setup`, then `python -m benchmarks.rivals [--quick] [--only=KIND,...]`: the MLP, the
Transformer blocks and the convolutions of `benchmarks.support.networks`, K=2, M=32, 1F1B, the same
mini-batch and first weights. PyTorch: two pinned processes of one thread, gloo over loopback,
everything kept or each stage but the last checkpointed. Ours: two devices of one thread each,
`never` and `full`, which recomputes nothing in the last cell. Steps compute loss and gradients,
without an update. Both are compared with the uncut network by loss and all gradients; one that
differs by more than float32 rounds ends the benchmark.
"Device" is the most that tensors of a step hold at once: of PyTorch on the device that needs most,
of ours, whose devices share an allocator, divided by K.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rivals.reference import Reference
from benchmarks.support import machine, networks, processes

PYTHON = Path(__file__).parents[2] / ".venv-bench/bin/python"
PAIRS = {"kept": "never", "checkpointed": "full"}  # policy of PyTorch → ours


def measure(kind: str, count: int) -> dict[str, list[Any]]:
    """Return library and policy → runs, in rounds."""
    programs = {
        **{f"pytorch,{policy}": ("benchmarks.rivals.pytorch", policy) for policy in PAIRS},
        **{f"ours,{policy}": ("benchmarks.rivals.ours", policy) for policy in PAIRS.values()},
    }
    runs: dict[str, list[Any]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reference.npz"
        processes.run(["benchmarks.rivals.ours", f"{kind},reference", str(path)])
        reference = Reference.read(path)
        for _ in range(count):
            for name, (module, what) in programs.items():
                python = str(PYTHON) if name.startswith("pytorch") else sys.executable
                run = processes.run([module, f"{kind},{what}", str(path)], python)
                runs[name].append(run)
                reference.check(f"{kind}, {name}", run)
    return runs


def print_kind(kind: str, runs: dict[str, list[Any]]) -> None:
    """Print a row for each rival, and the ratios."""
    print(f"\n{kind:<20} {'s':>7} {'device MiB':>11} {'error':>8}  spread of s")
    step_s = {}
    for name, of_name in runs.items():
        step_s[name] = processes.median(of_name, "s")
        print(
            f"{name:<20} {step_s[name]:7.3f} {processes.median(of_name, 'device_mib'):11.1f} "
            f"{of_name[0]['error']:8.0e}  {processes.spread(of_name, 's')}"
        )
    for theirs, ours in PAIRS.items():
        ratio = step_s[f"pytorch,{theirs}"] / step_s[f"ours,{ours}"]
        print(f"PyTorch, {theirs} / ours, {ours}: {ratio:.2f}")


def main() -> None:
    """Run every rival in processes of its own and print tables."""
    options = processes.rounds_parser(__doc__, networks.BLOCKS).parse_args()
    if not PYTHON.exists():
        sys.exit("benchmarks.rivals needs PyTorch in .venv-bench. Run make bench-setup")
    count = 1 if options.quick else 3
    print(f"{machine.describe()}; K={networks.K}, M={networks.M}, medians of {count} rounds")
    for kind in options.only:
        runs = measure(kind, count)
        processes.print_load(runs)
        print_kind(kind, {name: processes.quiet(of_name) for name, of_name in runs.items()})


if __name__ == "__main__":
    main()
