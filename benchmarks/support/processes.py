"""Runs a benchmark's configurations, each in a process of its own, in interleaved rounds.

Most benchmarks have the same frame: their `main` calls `measured`, and prints a table of what it
returns. A process that is started with a configuration measures that one and prints it as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.support import machine

QUIET_CORES = 0.06
"""A run during which other processes used more cores than this does not count."""


def parser(description: str | None, only: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser of a benchmark's flags.

    Args:
        description: docstring of the benchmark.
        only: names of its parts; `--only` chooses some of them, in its order.
    """
    arguments = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def chosen(text: str) -> list[str]:
        for name in text.split(","):
            if name not in only:
                raise argparse.ArgumentTypeError(f"unknown {name!r}; there are {', '.join(only)}")
        return text.split(",")

    if only:
        text = f"some of {','.join(only)}"
        arguments.add_argument("--only", type=chosen, default=list(only), help=text)
    return arguments


def rounds_parser(description: str | None, only: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of a benchmark whose `main` calls `measured`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    arguments = parser(description, only)
    arguments.add_argument("--quick", action="store_true", help="one round, or fewer cases")
    arguments.add_argument("configuration", nargs="?", help=argparse.SUPPRESS)
    return arguments


def measured(
    options: argparse.Namespace,
    module: str,
    configurations: Sequence[str],
    measure: Callable[[str], Mapping[str, Any]],
    count: int = 3,
) -> dict[str, list[Any]]:
    """Return configuration → what its undisturbed runs found; all runs if every one was disturbed.

    Prints the machine, and how busy other processes kept it. In a process that was started for one
    configuration, prints what `measure` returns, and exits.

    Args:
        options: what `rounds_parser` has parsed.
        module: name of the benchmark's module, for `python -m`.
        configurations: texts, one argument each.
        measure: measures one configuration.
        count: rounds.
    """
    if options.configuration:
        print(json.dumps(measure(options.configuration)))
        sys.exit()
    count = 1 if options.quick else count
    print(f"{machine.describe()}; medians of {count} rounds")
    runs = rounds(module, configurations, count)
    print_load(runs)
    return {name: quiet(of_name) for name, of_name in runs.items()}


def rounds(module: str, configurations: Sequence[str], count: int) -> dict[str, list[Any]]:
    """Run `python -m module CONFIGURATION` for each of them, `count` times in turn.

    Args:
        module: prints one JSON object on its last line when given a configuration.
        configurations: texts, one argument each.
        count: rounds.

    Returns:
        configuration → what its runs printed, each with `other_load`: cores used by others.
    """
    runs: dict[str, list[Any]] = {name: [] for name in configurations}
    for _ in range(count):
        for name in configurations:
            runs[name].append(run([module, name]))
    return runs


def run(arguments: Sequence[str], python: str = sys.executable) -> dict[str, Any]:
    """Run `python -m ARGUMENTS` and return the JSON object that it prints, with `other_load`."""
    load = machine.Load()
    command = [python, "-m", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return {**result, "other_load": load.stop()}


def quiet(runs: Sequence[Any]) -> list[Any]:
    """Return the runs that were not disturbed by other processes; all, if every run was."""
    return [run for run in runs if run["other_load"] <= QUIET_CORES] or list(runs)


def print_load(runs: Mapping[str, Sequence[Any]]) -> None:
    """Print how busy other processes were, and how many runs do not count for that.

    Args:
        runs: configuration → its runs, as `rounds` returns them.
    """
    every = [run for of_name in runs.values() for run in of_name]
    dropped = len(every) - sum(len(quiet(of_name)) for of_name in runs.values())
    busy = sum(run["other_load"] > QUIET_CORES for run in every) - dropped
    print(f"other load {spread(every, 'other_load')} cores; {dropped} of {len(every)} runs dropped")
    if busy:
        print(f"{busy} runs beside more than {QUIET_CORES} cores of other load count all the same")


def median(runs: Sequence[Any], key: str) -> float:
    """Return the median of one figure over runs."""
    return float(statistics.median(run[key] for run in runs))


def spread(runs: Sequence[Any], key: str) -> str:
    """Return a figure's smallest and largest value over runs."""
    values = [run[key] for run in runs]
    return f"{min(values):.3f} to {max(values):.3f}"
