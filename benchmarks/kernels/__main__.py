"""Where does a layer of ours cost more than it must?

`make bench-setup`, then `python -m benchmarks.kernels [--quick] [--only=CASE,...]`: layers of the
shapes of `benchmarks.kernels.cases`, each in the programs of a cell of its own (a forward that
keeps nothing; a forward that keeps what its backward reads, and that backward), and the same layers
of PyTorch (without gradients; with those of x and all weights). Float32, one thread, milliseconds
of processor time, processes of their own in interleaved rounds.

"Product" is the milliseconds of a 1,024² matrix product in the same process: the libraries multiply
at different rates, and other processes slow both. "In products" divides forward and backward by it:
by this figure two rounds, and two libraries, compare. Below them are the shares of forward and
backward that types of operations take, by the trace of each library.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels.cases import CASES, QUICK
from benchmarks.support import machine, processes

ROUNDS, QUICK_ROUNDS = 3, 1
AIM = 1.0
PYTHON = Path(__file__).parents[2] / ".venv-bench/bin/python"
LEAST_SHARE = 0.02  # of operations that are printed


def in_products(runs: Sequence[Mapping[str, Any]], part: str) -> float:
    """Return how many matrix products take as long as a part of a step, the median of runs."""
    return statistics.median(run[part] / run["product_ms"] for run in runs)


def over_ms(found: Mapping[str, Sequence[Any]], name: str) -> float:
    """Return the milliseconds of our forward and backward of a case over those of PyTorch's."""
    ours, theirs = (
        processes.median(processes.quiet(found[f"{rival},{name}"]), "both_ms")
        for rival in ("ours", "pytorch")
    )
    return ours / theirs


def operations(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the median shares of types of operations, the largest first."""
    shares: dict[str, float] = {}
    for kind in runs[0]["operations"]:
        shares[kind] = statistics.median(
            run["operations"].get(kind, 0.0) / sum(run["operations"].values()) for run in runs
        )
    largest = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{kind.removeprefix('_Mkl').removeprefix('Native')} {100 * share:.0f} %"
        for kind, share in largest
        if share >= LEAST_SHARE
    )


def print_rows(name: str, ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """Print the rows of a case, and return ours over PyTorch's, each in products of its own."""
    for rival, runs in (("ours", ours), ("PyTorch", theirs)):
        forward, both, product = (
            processes.median(runs, f"{part}_ms") for part in ("forward", "both", "product")
        )
        print(
            f"{name if rival == 'ours' else '':<20} {rival:<8} {forward:8.3f} {both:9.3f} "
            f"{product:8.1f} {in_products(runs, 'both_ms'):12.3f}  "
            f"{processes.spread(runs, 'both_ms')}",
            flush=True,
        )
    for rival, runs in (("ours", ours), ("PyTorch", theirs)):
        print(f"{'':<20} {rival:<8} {operations(runs)}")
    return in_products(ours, "both_ms") / in_products(theirs, "both_ms")


def main() -> None:
    """Run every case in both libraries, and print a table."""
    parser = processes.parser(__doc__, measures=False)
    parser.add_argument("--only", help="cases between commas")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else QUICK if options.quick else tuple(CASES)
    if unknown := sorted(set(names) - set(CASES)):
        parser.error(f"--only={unknown[0]}: the cases are {', '.join(CASES)}")
    if not PYTHON.exists():
        sys.exit("benchmarks.kernels needs PyTorch in .venv-bench. Run make bench-setup")
    count = QUICK_ROUNDS if options.quick else ROUNDS
    print(machine.describe())
    print(f"one thread, processor time; medians of {count} rounds")
    found: dict[str, list[Any]] = {}
    for _ in range(count):
        for name in names:
            ours = processes.run(["benchmarks.kernels.ours", name])
            theirs = processes.run(["benchmarks.kernels.pytorch", name], str(PYTHON))
            found.setdefault(f"ours,{name}", []).append(ours)
            found.setdefault(f"pytorch,{name}", []).append(theirs)
    print(
        f"\n{'layer':<20} {'':<8} {'F ms':>8} {'F+B ms':>9} {'product':>8} {'in products':>12}  "
        "spread of F+B"
    )
    ratios = [
        print_rows(
            name,
            processes.quiet(found[f"ours,{name}"]),
            processes.quiet(found[f"pytorch,{name}"]),
        )
        for name in names
    ]
    worst = max(zip(ratios, names, strict=True))
    in_ms = ", ".join(f"{name} {over_ms(found, name):.2f}" for name in names)
    print(f"ours over PyTorch's, in milliseconds: {in_ms}")
    listed = ", ".join(f"{name} {ratio:.2f}" for name, ratio in zip(names, ratios, strict=True))
    print(f"ours over PyTorch's, in products: {listed}")
    processes.conclude(
        "kernels", f"{worst[1]} {worst[0]:.2f} of PyTorch's", f"at most {AIM}", found
    )


if __name__ == "__main__":
    main()
