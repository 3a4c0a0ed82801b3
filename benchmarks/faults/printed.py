"""Do the commands of the page on hosts work as printed, and with the bits of one process?

`python -m benchmarks.faults.printed [HOSTS]`; needs root. The commands of "On two hosts" in
`docs/hosts.md` run in network namespaces with the page's addresses and a folder `/shared` of their
own, one core of this machine for each host. With three or four hosts, workers are added to the
file, and the last command has as many partitions. The last checkpoint is compared, tensor by
tensor, with that of one process on as many cores; the exit code is 1 if it differs, if a command
fails, or if a process or a namespace is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.faults import hosts
from benchmarks.faults.__main__ import same
from benchmarks.support import machine, saved

ROOT = Path(__file__).parents[2]
SHARED = Path("/shared")
_SECTION = re.compile(r"^## On two hosts\n(.*?)^## ", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"(?:^ {8}.*\n)+", re.MULTILINE)
_LIMIT_S = 900.0


def commands(page: str) -> list[str]:
    """Return the commands that the page prints for two hosts, in their order."""
    (section,) = _SECTION.findall(page)
    return [textwrap.dedent(block) for block in _BLOCK.findall(section)]


def for_hosts(printed: Sequence[str], count: int) -> list[tuple[int, str]]:
    """Return (host, command) for a number of hosts: a worker on each, all else on the first.

    Args:
        printed: the commands of the page: a file, a secret, two workers and a chief.
        count: number of hosts.
    """
    cluster, token, worker, second, chief = printed
    if second != worker.replace("--task=0", "--task=1"):
        sys.exit(f"the two workers' commands differ by more than --task:\n{worker}{second}")
    last = '"10.80.0.11:2223"'
    workers = ", ".join(f'"10.80.0.{10 + n}:2223"' for n in range(1, count))
    return [
        (0, cluster.replace(last, workers)),
        (0, token),
        *((n, worker.replace("--task=0", f"--task={n}")) for n in range(count)),
        (0, chief.replace("--num_partitions=2", f"--num_partitions={count}")),
    ]


@contextlib.contextmanager
def shared_folder() -> Iterator[None]:
    """Make `/shared`, over which each host mounts the folder of the run, unless it exists."""
    is_new = not SHARED.exists()
    if is_new:
        SHARED.mkdir()
    try:
        yield
    finally:
        if is_new:
            SHARED.rmdir()


def started(net: hosts.Hosts, folder: Path, host: int, command: str) -> subprocess.Popen[bytes]:
    """Start a command on a host, with one core and the folder at `/shared`."""
    cores = sorted(os.sched_getaffinity(0))
    script = f"mount --bind {folder} {SHARED} && exec bash -euc {shlex.quote(command)}"
    words = ["taskset", "--cpu-list", str(cores[host % len(cores)])]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        [*net.command(host), "unshare", "--mount", *words, "sh", "-c", script],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
    )


def run(net: hosts.Hosts, folder: Path, printed: Sequence[tuple[int, str]]) -> list[int]:
    """Run the commands: those that end one after the other, then the others together.

    Returns:
        Their exit codes.
    """
    codes, running = [], []
    try:
        for host, command in printed:
            print(f"host {host}:\n{textwrap.indent(command, '    ')}", end="", flush=True)
            process = started(net, folder, host, command)
            if "lingvo_gpipe" in command:
                running.append(process)
            else:
                codes.append(process.wait())
        end_s = time.monotonic() + _LIMIT_S
        codes += [process.wait(max(1.0, end_s - time.monotonic())) for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return codes


def main() -> None:
    """Run the page's commands, then one process, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hosts", nargs="?", type=int, default=2, choices=(2, 3, 4))
    count = parser.parse_args().hosts
    print(machine.describe())
    printed = for_hosts(commands((ROOT / "docs/hosts.md").read_text(encoding="utf-8")), count)
    with tempfile.TemporaryDirectory() as name, shared_folder():
        folder = Path(name)
        with hosts.Hosts(count) as net:
            codes = run(net, folder, printed)
            ports = net.open_ports()
        left = [*ports, *net.left()]
        if any(codes):
            sys.exit(f"exit codes {codes}")
        (chief,) = [command for _, command in printed if "--model" in command]
        model = re.findall(r"--(?:model|num_partitions|mode)=\S+", chief)
        one = folder / "one"
        subprocess.run(
            [sys.executable, "-m", "lingvo_gpipe.trainer", *model, f"--logdir={one}"],
            cwd=ROOT,
            check=True,
        )
        (logdir,) = re.findall(r"--logdir=/shared/(\S+)", chief)
        values = saved.values(one)
        is_same = bool(values) and same(saved.values(folder / logdir), values)
    print(f"left behind: {', '.join(left) or 'nothing'}")
    print(f"printed, {count} hosts: {'the same bits' if is_same else 'OTHER BITS'} as one process")
    sys.exit(0 if is_same and not left else 1)


if __name__ == "__main__":
    main()
