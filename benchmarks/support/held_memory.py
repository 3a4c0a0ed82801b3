"""Bytes of the tensors that each worker process holds at most, beside those of its plan.

Each of R x K devices is a process of its own. TensorFlow's allocator counts the bytes of tensors
that are allocated, and the most at once. Its resident memory is more: with oneDNN, that allocator
is a pool of regions that are never returned and not always filled, and gRPC receives tensors in
buffers of its own. So the peak of resident memory (VmHWM) is measured as well, over what was
resident after steps of a small network of the same layers, which load kernels and begin threads and
connections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import links
from benchmarks.support import link_models

LAYERS, ROWS = 24, 512
PER_REPLICA = 8
STEPS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class _Worker:
    """A worker process that answers a line on its input by what its allocator counted."""

    process: subprocess.Popen[str]

    def allocated(self) -> tuple[int, int]:
        """Return bytes of tensors: now, and the most since the last call."""
        if self.process.stdin is None or self.process.stdout is None:
            raise ValueError("the worker has no pipes")
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        now, most = self.process.stdout.readline().split()
        return int(now), int(most)

    def resident(self, name: str) -> int:
        """Return a figure of the process in bytes, as the kernel keeps it."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        for line in status.splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
        raise LookupError(name)

    def forget_peak(self) -> None:
        """Count the peak of resident memory from now on."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5", encoding="ascii")


def measure(num_replicas: int, num_partitions: int, width: int) -> dict[str, list[int]]:
    """Return bytes of each worker: planned, of tensors, resident, received from replicas in a step.

    Planned are those of its cell in the replica that needs most.
    """
    count = num_replicas * num_partitions
    with _workers(count) as (addresses, workers):
        import tensorflow as tf

        tf.config.threading.set_inter_op_parallelism_threads(2)
        tf.config.experimental_connect_to_cluster(
            links.cluster_of(addresses), job_name="chief", task_index=0, protocol="grpc"
        )
        _train(num_replicas, num_partitions, 16)
        resident = [worker.resident("VmRSS") for worker in workers]
        allocated = [worker.allocated()[0] for worker in workers]
        for worker in workers:
            worker.forget_peak()
        planned = _train(num_replicas, num_partitions, width)
        tensors = [
            worker.allocated()[1] - before
            for worker, before in zip(workers, allocated, strict=True)
        ]
        measured = [
            worker.resident("VmHWM") - before
            for worker, before in zip(workers, resident, strict=True)
        ]
    received = [0] * count
    for sent in planned.exchange.sent():
        received[sent.target] += sent.size
    of_devices = list(planned.device_bytes)
    return {
        "planned": of_devices,
        "tensors": tensors,
        "resident": measured,
        "received": received,
    }


def _train(num_replicas: int, num_partitions: int, width: int) -> Any:
    """Do a few updates of dense layers by Adam; return the plan."""
    import tensorflow as tf

    from lingvo_gpipe import layers, optim, pipelining, task
    from lingvo_gpipe.plan import step_plan
    from lingvo_gpipe.run import learner

    dense = [
        layers.Dense.Params(name=f"d{n}", units=width, activation="tanh", use_bias=False)
        for n in range(LAYERS)
    ]
    devices = num_replicas * num_partitions
    model = pipelining.PipeliningLayer.Params(
        layers=[*dense, layers.MeanSquaredError.Params(name="error")],
        num_partitions=num_partitions,
        num_replicas=num_replicas,
        num_micro_batches=PER_REPLICA * num_replicas,
        schedule="1f1b",
        devices=tuple(f"/job:worker/replica:0/task:{n}/device:CPU:0" for n in range(devices)),
    )
    adam = optim.Optimizer.Params(name="Adam", learning_rate=1e-3)
    x = tf.random.stateless_normal([ROWS * num_replicas, width], [1, 2])
    batch = {"x": x, "target": tf.zeros_like(x)}
    specs = {name: tf.TensorSpec.from_tensor(value) for name, value in batch.items()}
    planned = step_plan.make(model, specs, optimizer_params=adam)
    made = learner.Learner(
        task.Task.Params(
            model=model,
            input=link_models.Numbers.Params(batch_size=1),  # not read
            train=task.Train(optimizer=adam, max_steps=STEPS),
        ),
        specs,
    )
    for _ in range(STEPS):
        float(made.update([batch]).loss)
    return planned


@contextlib.contextmanager
def _workers(count: int) -> Iterator[tuple[Sequence[str], Sequence[_Worker]]]:
    """Start worker processes; yield the addresses of chief and workers, and the workers."""
    with contextlib.ExitStack() as stack:
        with contextlib.ExitStack() as taken:
            ports = [
                taken.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
                for _ in range(count + 1)
            ]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        module = "benchmarks.support.held_memory"
        workers = []
        for number in range(count):
            process = subprocess.Popen(
                [sys.executable, "-m", module, ",".join(addresses), str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | {"TF_ENABLE_ONEDNN_OPTS": "1"},  # its allocator counts
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            workers.append(_Worker(process))
        for worker in workers:
            if next(iter(worker.process.stdout or ()), "").strip() != "serving":
                sys.exit("a worker does not serve")
        yield addresses, workers


def _serve(addresses: Sequence[str], index: int) -> None:
    """Serve as a worker; answer each line by the bytes of tensors now, and at most since."""
    import tensorflow as tf

    registered = links.serve(addresses, index)
    while registered and sys.stdin.readline():
        info = tf.config.experimental.get_memory_info("CPU:0")
        tf.config.experimental.reset_memory_stats("CPU:0")
        print(info["current"], info["peak"], flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1].split(","), int(sys.argv[2]))
