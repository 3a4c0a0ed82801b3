"""Bytes that each worker process holds at most in a step, beside those that its plan has for it.

Each of R x K devices is a process of its own. What counts is the peak of its resident memory
(VmHWM) over what was resident after steps of a small network of the same layers, which load kernels
and begin threads and connections. It includes what a plan does not count, since on accelerators it
lies in the host's memory: the buffers in which gRPC receives what other replicas send.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import links
from benchmarks.support import link_models

LAYERS, WIDTH, ROWS = 24, 2048, 512
PER_REPLICA = 8
STEPS = 3


def measure(num_replicas: int, num_partitions: int) -> dict[str, list[int]]:
    """Return bytes of each worker: planned, measured, and received from other replicas in a step.

    Planned are those of its cell in the replica that needs most.
    """
    count = num_replicas * num_partitions
    with _workers(count) as (addresses, processes):
        import tensorflow as tf

        tf.config.threading.set_inter_op_parallelism_threads(2)
        tf.config.experimental_connect_to_cluster(
            links.cluster_of(addresses), job_name="chief", task_index=0, protocol="grpc"
        )
        _train(num_replicas, num_partitions, width=16)
        before = []
        for process in processes:
            Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")
            before.append(_status(process.pid, "VmRSS"))
        planned = _train(num_replicas, num_partitions, width=WIDTH)
        measured = [
            _status(process.pid, "VmHWM") - resident
            for process, resident in zip(processes, before, strict=True)
        ]
    received = [0] * count
    for sent in planned.exchange.sent():
        received[sent.target] += sent.size
    of_devices = list(planned.device_bytes) * num_replicas
    return {"planned": of_devices, "received": received, "measured": measured}


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
def _workers(count: int) -> Iterator[tuple[Sequence[str], Sequence[subprocess.Popen[str]]]]:
    """Start worker processes; yield the addresses of chief and workers, and the processes."""
    with contextlib.ExitStack() as stack:
        with contextlib.ExitStack() as taken:
            ports = [
                taken.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
                for _ in range(count + 1)
            ]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        command = [sys.executable, "-m", "benchmarks.links", f"--addresses={','.join(addresses)}"]
        processes = []
        for number in range(count):
            process = subprocess.Popen(
                [*command, f"--worker={number}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            if next(iter(process.stdout or ()), "").strip() != "serving":
                sys.exit("a worker does not serve")
        yield addresses, processes


def _status(pid: int, name: str) -> int:
    """Return a figure of a process in bytes, as the kernel keeps it."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)
