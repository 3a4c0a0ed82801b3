"""Runs a benchmark's configurations, each in a process of its own, in interleaved rounds.

All benchmarks begin and end alike: `parser` reads the command line, `conclude` prints how busy
other processes were, how many runs do not count for that, and the figure beside its aim.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.support import machine


def parser(description: str | None, *, measures: bool = True) -> argparse.ArgumentParser:
    """Return a parser of the flags that every benchmark takes.

    Args:
        description: docstring of the benchmark.
        measures: whether processes of the benchmark measure one configuration each.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--quick", action="store_true", help="fewer rounds, or fewer cases")
    if measures:
        found.add_argument("configuration", nargs="?", help=argparse.SUPPRESS)
    return found


def conclude(
    name: str, figure: str, aim: str, found: Mapping[str, Sequence[Any]] | None = None
) -> None:
    """Print the last lines of a benchmark.

    Args:
        name: name of the figure.
        figure: what was measured.
        aim: what it should be.
        found: configuration → its runs, as `rounds` returns them; None: the load makes no
            difference, since nothing was measured.
    """
    if found is not None:
        runs = [run for of_one in found.values() for run in of_one]
        dropped = sum(len(of_one) - len(quiet(of_one)) for of_one in found.values())
        kept = sum(map(disturbed, found.values())) - dropped
        also = f"; {kept} more count, since no run of their kind was quiet" if kept else ""
        print(
            f"other load {spread(runs, 'other_load')} cores; dropped for more than {QUIET_CORES}: "
            f"{dropped} of {len(runs)} runs{also}"
        )
    print(f"{name}: {figure} (aim {aim})")


def rounds(module: str, configurations: Sequence[str], count: int) -> dict[str, list[Any]]:
    """Run `python -m module CONFIGURATION` for each of them, `count` times in turn.

    Args:
        module: prints one JSON object on its last line when given a configuration.
        configurations: texts, one argument each.
        count: rounds.

    Returns:
        configuration → what its runs printed, each with `other_load`: cores used by others.
    """
    found: dict[str, list[Any]] = {name: [] for name in configurations}
    for _ in range(count):
        for name in configurations:
            found[name].append(run([module, name]))
    return found


def run(arguments: Sequence[str], python: str = sys.executable) -> dict[str, Any]:
    """Run `python -m ARGUMENTS` and return the JSON object that it prints, with `other_load`."""
    load = machine.Load()
    command = [python, "-m", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return {**result, "other_load": load.stop()}


QUIET_CORES = 0.06
"""A repetition during which other processes took more cores than this does not count."""


def quiet(runs: Sequence[Any]) -> list[Any]:
    """Return the runs that were not disturbed by other processes; all, if every run was."""
    return [run for run in runs if run["other_load"] <= QUIET_CORES] or list(runs)


def disturbed(runs: Sequence[Any]) -> int:
    """Return how many runs other processes disturbed."""
    return sum(run["other_load"] > QUIET_CORES for run in runs)


def median(runs: Sequence[Any], key: str) -> float:
    """Return the median of one figure over runs."""
    return float(statistics.median(run[key] for run in runs))


def spread(runs: Sequence[Any], key: str) -> str:
    """Return a figure's smallest and largest value over runs."""
    values = [run[key] for run in runs]
    return f"{min(values):.3f} to {max(values):.3f}"
