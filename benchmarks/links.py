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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support import hosts as network

PORT = 2223
STEPS = 10
PER_VARIABLE = 3 * 2**10
CASES = ("dense 1x2", "dense 1x3", "convolution 1x3", "ties 1x2")
REPLICAS = ("dense 2x1", "dense 3x1", "dense 4x1", "dense 2x2", "table 2x1")
_SENT = re.compile(r"bytes_sent:(\d+)")


def _shape(case: str) -> tuple[int, int]:
    """Return R and K of a case, `name RxK`."""
    replicas, partitions = case.split()[1].split("x")
    return int(replicas), int(partitions)


def cluster_of(addresses: Sequence[str]) -> Any:
    """Return the cluster of a chief and workers."""
    import tensorflow as tf

    return tf.train.ClusterSpec({"chief": [addresses[0]], "worker": list(addresses[1:])})


def worker(addresses: Sequence[str], index: int) -> None:
    """Serve until the process is killed."""
    import tensorflow as tf

    from lingvo_gpipe import hyperparams
    from lingvo_gpipe.run.worker import Requests, register

    hyperparams.register_package("benchmarks")
    registered = register(Requests())
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=2
    )
    cluster = cluster_of(addresses)
    server = tf.distribute.Server(cluster, "worker", index, protocol="grpc", config=config)
    print("serving", flush=True)
    server.join()
    del registered


def chief(addresses: Sequence[str], case: str, on_worker: bool) -> None:
    """Run updates between two lines to the parent, and print what the plan derives."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.experimental_connect_to_cluster(
        cluster_of(addresses), job_name="chief", task_index=0, protocol="grpc"
    )
    from benchmarks.support import link_models
    from lingvo_gpipe.plan import step_plan
    from lingvo_gpipe.run import worker_input
    from lingvo_gpipe.run.learner import Learner

    task = link_models.TASKS[case.split()[0]]()
    task.model.num_replicas, task.model.num_partitions = _shape(case)
    task.model.devices = tuple(
        f"/job:worker/replica:0/task:{k}/device:CPU:0" for k in range(len(addresses) - 1)
    )
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
    found = {
        "derived": [[*ends, size] for ends, size in _derived(planned, on_worker).items()],
        "variables": len(learner.variables),
        "exchanged": planned.exchange.sent_bytes,
        "weights": sum(spec.size_bytes for spec in planned.analysis.variables.values()),
    }
    print(json.dumps(found), flush=True)
    sys.stdin.readline()


def _derived(planned: Any, on_worker: bool) -> dict[tuple[int, int], int]:
    """Return (from, to) → the bytes that a host sends to another one, by the plan; 0: the chief."""
    from lingvo_gpipe.network.traffic import links

    cells, derived = planned.analysis.cells, collections.Counter[tuple[int, int]]()
    num_devices = planned.analysis.table.num_devices
    for first in range(1, 1 + planned.num_replicas * num_devices, num_devices):
        for link in planned.links:
            target = first + cells[link.target].device_number
            of_input = link.source == links.INPUT
            origin = first + cells[0 if of_input else link.source].device_number
            if of_input and not on_worker:
                origin = 0
            if origin != target:
                derived[origin, target] += link.forward_bytes
                derived[target, origin] += link.backward_bytes
    for sent in planned.exchange.sent():
        derived[1 + sent.source, 1 + sent.target] += sent.size
    return dict(derived)


def bytes_sent(hosts: network.Hosts, count: int) -> dict[tuple[int, int], int]:
    """Return (from, to) → bytes of payload sent so far, over connections that are still open."""
    host_of = {address: number for number, address in enumerate(hosts.addresses[:count])}
    found = collections.Counter[tuple[int, int]]()
    for source in range(count):
        command = [*hosts.command(source), "ss", "-tinH"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peer: int | None = None
        for line in lines.splitlines():
            if not line[:1].isspace():
                address = line.split()[4].rpartition(":")[0].strip("[]").removeprefix("::ffff:")
                peer = host_of.get(address)
            elif peer is not None and (match := _SENT.search(line)):
                found[source, peer] += int(match[1])
    return found


@contextlib.contextmanager
def _chief(hosts: network.Hosts, case: str, flags: Sequence[str]) -> Iterator[Any]:
    """Start workers and chief, each on its host; yield the chief."""
    replicas, partitions = _shape(case)
    count = replicas * partitions
    addresses = ",".join(f"{address}:{PORT}" for address in hosts.addresses[: count + 1])
    with contextlib.ExitStack() as stack:

        def start(host: int, *words: str) -> subprocess.Popen[str]:
            program = [sys.executable, "-m", "benchmarks.links", f"--addresses={addresses}", *words]
            process = subprocess.Popen(
                [*hosts.command(host), *program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(Path.cwd())},
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        for process in [start(k + 1, f"--worker={k}") for k in range(count)]:
            _expect(process, "serving")
        yield start(0, f"--chief={case}", *flags)


def _expect(process: Any, line: str) -> None:
    if process.stdout.readline().strip() != line:
        sys.exit("a process has ended: see its lines above")


def measure(case: str, flags: Sequence[str]) -> bool:
    """Print the table of a case; return whether every figure is within its bound."""
    replicas, partitions = _shape(case)
    count = replicas * partitions + 1
    with network.Hosts(count) as hosts, _chief(hosts, case, flags) as process:
        _expect(process, "ready")
        before = bytes_sent(hosts, count)
        process.stdin.write("go\n")
        process.stdin.flush()
        found = json.loads(process.stdout.readline())
        after = bytes_sent(hosts, count)
    each = {ends: (size - before.get(ends, 0)) / STEPS for ends, size in after.items()}
    derived = {(source, target): size for source, target, size in found["derived"]}
    weights = found["weights"]
    print(f"{case}: {found['variables']} variables, {weights:,} bytes of weights and state")
    good = True
    for ends in sorted(each.keys() | {ends for ends, size in derived.items() if size}):
        names = ["chief" if host == 0 else f"worker {host - 1}" for host in ends]
        verdict = ""
        if 0 not in ends and derived.get(ends):
            ratio = each.get(ends, 0) / derived[ends]
            good = good and 0.95 <= ratio <= 1.05
            verdict = f"{ratio:.3f} of derived {derived[ends]:,}"
        print(f"  {names[0]} → {names[1]}: {each.get(ends, 0):,.0f} bytes a step  {verdict}")
    if replicas > 1:
        between = [
            size
            for (a, b), size in each.items()
            if 0 not in (a, b) and (a - 1) // partitions != (b - 1) // partitions
        ]
        share, expected = sum(between) / replicas / weights, found["exchanged"] / weights
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


def main() -> int:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--addresses", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--chief", help=argparse.SUPPRESS)
    parser.add_argument("--on_worker", action="store_true", help="workers read the mini-batches")
    parser.add_argument("--quick", action="store_true", help="one case")
    parser.add_argument("cases", nargs="*", default=[*CASES, *REPLICAS])
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.addresses.split(","), options.worker)
    elif options.chief is not None:
        chief(options.addresses.split(","), options.chief, options.on_worker)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts end with it
        flags = ["--on_worker"] if options.on_worker else []
        cases = options.cases[:1] if options.quick else options.cases
        return 1 if {measure(case, flags) for case in cases} - {True} else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
