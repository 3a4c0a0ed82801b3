"""How many bytes go over each link between hosts in a step, against those that `plan` derives?

`python -m benchmarks.links`, as root, with the programs `ip` and `ss`: the chief and R x K workers
on hosts of their own, network namespaces with addresses of their own. The bytes that each host
sends to each other one are read from the system's counters of every TCP connection, payload only,
over ten updates after the graphs are built. A link's bytes should be within 5 % of the derived
ones; those of the chief below the fields of the mini-batch plus 3 KiB for each variable. With R
replicas, each sends 2 (R - 1) / R of the weights' bytes on average; less where the gradient of a
table is sent as rows. With `--on_worker`, the worker of each replica's first cell reads the
examples of that replica, and no field counts for the chief, nor between replicas.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PORT = 2223
STEPS = 10
PER_VARIABLE = 3 * 2**10
CASES = ("dense 1x2", "dense 1x3", "convolution 1x3", "ties 1x2")
REPLICAS = ("dense 2x1", "dense 3x1", "dense 4x1", "dense 2x2", "table 2x1")
_SENT = re.compile(r"bytes_sent:(\d+)")


def task_of(case: str) -> Any:
    """Return the task of a case, `name RxK`."""
    from benchmarks.support import link_models

    task = link_models.TASKS[case.split()[0]]()
    task.model.num_replicas, task.model.num_partitions = _shape(case)
    task.model.devices = tuple(
        f"/job:worker/replica:0/task:{k}/device:CPU:0" for k in range(_num_workers(case))
    )
    return task


def _shape(case: str) -> tuple[int, int]:
    replicas, partitions = case.split()[1].split("x")
    return int(replicas), int(partitions)


def _num_workers(case: str) -> int:
    replicas, partitions = _shape(case)
    return replicas * partitions


def worker(addresses: Sequence[str], index: int) -> None:
    """Serve until the process is killed."""
    registered = serve(addresses, index)
    while registered:
        time.sleep(60)


def serve(addresses: Sequence[str], index: int) -> object:
    """Begin to serve as a worker, and print a line; return what must stay alive meanwhile."""
    import tensorflow as tf

    from lingvo_gpipe import hyperparams
    from lingvo_gpipe.run.worker import Requests, register

    hyperparams.register_package("benchmarks")
    registered = register(Requests())
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=2
    )
    tf.distribute.Server(cluster_of(addresses), "worker", index, protocol="grpc", config=config)
    print("serving", flush=True)
    return registered


def chief(addresses: Sequence[str], case: str, on_worker: bool) -> None:
    """Run updates between two lines to the parent, and print what the plan derives."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.experimental_connect_to_cluster(
        cluster_of(addresses), job_name="chief", task_index=0, protocol="grpc"
    )
    from lingvo_gpipe.plan import step_plan
    from lingvo_gpipe.run import worker_input
    from lingvo_gpipe.run.learner import Learner

    task = task_of(case)
    task.input.on_worker = on_worker
    own = task.input.instantiate()
    planned = step_plan.make_for(task)
    learner = Learner(task, own.element_spec(training=True))
    source = worker_input.source_of(own, learner.pipe.executor, print)
    batches = iter(source.batches(1))
    for _ in range(3):
        float(learner.update([next(batches)]).loss)
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(STEPS):
        float(learner.update([next(batches)]).loss)
    derived = _derived(planned, on_worker=on_worker)
    found = {"derived": derived, "variables": len(learner.variables)}
    found["exchanged"] = planned.exchange.sent_bytes
    found["weights"] = sum(spec.size_bytes for spec in planned.analysis.variables.values())
    print(json.dumps(found), flush=True)
    sys.stdin.readline()


def _derived(planned: Any, on_worker: bool) -> dict[str, int]:
    """Return "FROM TO" → the bytes that a host sends to another one, by the plan."""
    from lingvo_gpipe.network.traffic import links

    analysis, derived = planned.analysis, collections.Counter[str]()
    num_devices = analysis.table.num_devices
    for first in range(1, 1 + planned.num_replicas * num_devices, num_devices):
        for link in planned.links:
            target = first + analysis.cells[link.target].device_number
            source = 0 if link.source == links.INPUT else link.source
            origin = first + analysis.cells[source].device_number
            if link.source == links.INPUT and not on_worker:
                origin = 0  # the chief
            if origin == target:
                continue
            derived[f"{origin} {target}"] += link.forward_bytes
            derived[f"{target} {origin}"] += link.backward_bytes
    for sent in planned.exchange.sent():
        derived[f"{1 + sent.source} {1 + sent.target}"] += sent.size
    return dict(derived)


def cluster_of(addresses: Sequence[str]) -> Any:
    """Return the cluster of a chief and workers."""
    import tensorflow as tf

    return tf.train.ClusterSpec({"chief": [addresses[0]], "worker": list(addresses[1:])})


def sent(hosts: Any, count: int) -> dict[tuple[int, int], int]:
    """Return (from, to) → bytes of payload sent so far, over connections that are still open."""
    host_of = {address: number for number, address in enumerate(hosts.addresses[:count])}
    found: dict[tuple[int, int], int] = {}
    for source in range(count):
        command = [*hosts.command(source), "ss", "-tinH"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peer: int | None = None
        for line in lines.splitlines():
            if not line[:1].isspace():
                address = line.split()[4].rpartition(":")[0].strip("[]").removeprefix("::ffff:")
                peer = host_of.get(address)
            elif peer is not None and (match := _SENT.search(line)):
                found[source, peer] = found.get((source, peer), 0) + int(match[1])
    return found


@contextlib.contextmanager
def _processes(hosts: Any, case: str, flags: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start workers and chief, each on its host; yield the chief."""
    count = _num_workers(case) + 1
    addresses = ",".join(f"{address}:{PORT}" for address in hosts.addresses[:count])
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.NamedTemporaryFile("w+"))

        def start(host: int, *words: str) -> subprocess.Popen[str]:
            program = [sys.executable, "-m", "benchmarks.links", f"--addresses={addresses}", *words]
            process = subprocess.Popen(
                [*hosts.command(host), *program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(Path.cwd())},
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        workers = [start(k + 1, f"--worker={k}") for k in range(count - 1)]
        for process in workers:
            if _line(process) != "serving":
                sys.exit("a worker does not serve")
        yield start(0, f"--chief={case}", *flags)
        log.seek(0)
        lines = [line for line in log if "Error" in line]
        if lines:
            print(lines[-1])


def _line(process: subprocess.Popen[str]) -> str:
    return next(iter(process.stdout or ()), "").strip()


def measure(case: str, flags: Sequence[str]) -> bool:
    """Print the table of a case; return whether every figure is within its bound."""
    from benchmarks.faults.hosts import Hosts

    count = _num_workers(case) + 1
    with Hosts(count) as hosts, _processes(hosts, case, flags) as process:
        if _line(process) != "ready":
            sys.exit("the chief ended")
        before = sent(hosts, count)
        process.stdin.write("go\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        found = json.loads(_line(process))
        after = sent(hosts, count)
    each = {ends: (size - before.get(ends, 0)) / STEPS for ends, size in after.items()}
    derived = {_ends(ends): size for ends, size in found["derived"].items()}
    print(
        f"{case}: {found['variables']} variables, {found['weights']:,} bytes of weights and state"
    )
    good = True
    for ends in sorted(each.keys() | {ends for ends, size in derived.items() if size}):
        names = ["chief" if host == 0 else f"worker {host - 1}" for host in ends]
        known = derived.get(ends, 0)
        verdict = ""
        if 0 not in ends and known:
            ratio = each.get(ends, 0) / known
            good = good and 0.95 <= ratio <= 1.05
            verdict = f"{ratio:.3f} of derived {known:,}"
        print(f"  {names[0]} → {names[1]}: {each.get(ends, 0):,.0f} bytes a step  {verdict}")
    replicas, partitions = _shape(case)
    if replicas > 1:
        apart = sum(
            size
            for (a, b), size in each.items()
            if 0 not in (a, b) and (a - 1) // partitions != (b - 1) // partitions
        )
        share = apart / replicas / found["weights"]
        expected = found["exchanged"] / found["weights"]
        good = good and 0.95 <= share / expected <= 1.05
        print(
            f"  a replica sends to others {share:.3f} of the weights' bytes a step, on average; "
            f"derived {expected:.3f}; 2 (R - 1) / R is {2 * (replicas - 1) / replicas:.3f}"
        )
    through = sum(size for ends, size in each.items() if 0 in ends)
    fields = sum(size for ends, size in derived.items() if 0 in ends)
    bound = fields + PER_VARIABLE * found["variables"]
    print(f"  chief, sent and received: {through:,.0f} bytes a step; bound {bound:,}", flush=True)
    return good and through <= bound


def _ends(text: str) -> tuple[int, int]:
    """Return the two hosts of a link, "FROM TO"."""
    source, target = map(int, text.split())
    return source, target


def main() -> int:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--addresses", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--chief", help=argparse.SUPPRESS)
    parser.add_argument("--on_worker", action="store_true", help="workers read the mini-batches")
    parser.add_argument("cases", nargs="*", default=[*CASES, *REPLICAS])
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.addresses.split(","), arguments.worker)
    elif arguments.chief is not None:
        chief(arguments.addresses.split(","), arguments.chief, arguments.on_worker)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts end with it
        flags = ["--on_worker"] if arguments.on_worker else []
        wrong = [case for case in arguments.cases if not measure(case, flags)]
        return min(1, len(wrong))
    return 0


if __name__ == "__main__":
    sys.exit(main())
