"""Where does the time of a real step go, device by device, and does it add up?

`python -m benchmarks.breakdown [--quick] [--pictures=FOLDER]`: updates by Adam, K=2 devices of one
thread each, fill-drain, full recomputation: the MLP, Transformer and convolution cells of
`benchmarks.support.blocks` (M=32), and AmoebaNet-D (3, 24) at 16² (M=8). The slots' times are
recorded as `--profile_steps` does. Each kind runs in processes of its own, in interleaved rounds;
those during which other processes took more than 0.06 cores do not count, unless all were like
that. Tables show the median step of the median run; parts are those of `schedule.breakdown`, and a
backward that recomputes is divided by FLOPs.

Parts are differences of clocks, so "rest", which is in none of them, is next to nothing unless
slots of a device overlap. The last line is stricter: it adds `start` (cutting the mini-batch,
reading the weights) and `transfer`. Devices of one process send each other nothing, so `transfer`
is how long a slot that could start did not: the runtime's delay, and waiting for a busy core.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support import machine, processes

KINDS = ("mlp", "transformer", "convolution", "amoebanet")
ROUNDS, QUICK_ROUNDS = 3, 1
STEPS = 10
AIM = 0.03
REST, RUNTIME = ("rest", "start"), ("rest", "start", "transfer")
PAPER = (
    "the paper (NeurIPS version, off its chart; two partitions, model and M not stated): "
    "computation 65.6 %, recomputation 22.5, bubble 4.1, imbalance 3.2, set-up 2.9"
)


def task_of(kind: str) -> tuple[Any, dict[str, Any]]:
    """Return the task of a kind of network, and its mini-batch."""
    import tensorflow as tf

    from benchmarks.support import blocks
    from lingvo_gpipe import input as inputs
    from lingvo_gpipe import optim, pipelining, task
    from lingvo_gpipe.tasks.image.model import amoebanet

    if kind == "amoebanet":
        layers = amoebanet.amoeba_net(
            amoebanet.AmoebaNet(
                genotype="D", num_cells=3, filters=24, classes=10, stem="small", dropout=0.3
            )
        )
        num_micro_batches = 8
        batch = {
            "image": tf.random.stateless_normal([16 * num_micro_batches, 16, 16, 3], [1, 2]),
            "label": tf.zeros([16 * num_micro_batches], tf.int32),
        }
    else:
        layers, batch = blocks.network(kind)
        num_micro_batches = blocks.M
    params = task.Task.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=layers, num_partitions=blocks.K, num_micro_batches=num_micro_batches
        ),
        input=inputs.InMemory.Params(batch_size=1),  # not read
        train=task.Train(
            optimizer=optim.Optimizer.Params(name="Adam", learning_rate=1e-4), max_steps=1
        ),
    )
    return params, batch


def measure(kind: str) -> dict[str, Any]:
    """Return the parts of each device's time in the median step, and what is not explained."""
    import tensorflow as tf

    from benchmarks.support import blocks
    from lingvo_gpipe.execution import placement
    from lingvo_gpipe.run import learner
    from lingvo_gpipe.run.profiles import recorder

    placement.prepare_logical_cpus(blocks.K)
    placement.prepare_threads(blocks.K, blocks.K)
    task, batch = task_of(kind)
    learned = learner.Learner(task, tf.nest.map_structure(tf.TensorSpec.from_tensor, batch))
    steps = recorder.Recorder(range(1, STEPS + 1), learned, Path(), print)
    found = []
    for number in range(STEPS + 2):
        with steps.noting():
            float(learned.update([batch]).loss)
        if number > 1:  # the first ones trace and warm up
            found.append(steps.last().rows)
    middle = sorted(found, key=length_s)[len(found) // 2]
    return {
        "devices": list(middle),
        "step_s": length_s(middle),
        "rest": statistics.median(share(rows, REST) for rows in found),
        "runtime": statistics.median(share(rows, RUNTIME) for rows in found),
    }


def length_s(rows: Sequence[Mapping[str, float]]) -> float:
    """Return the seconds of a step from the parts of each device, which add up to it."""
    return sum(rows[0].values())


def share(rows: Sequence[Mapping[str, float]], parts: Sequence[str]) -> float:
    """Return the share of some parts, each without its sign, where it is largest of all devices."""
    return max(sum(abs(row[part]) for part in parts) / sum(row.values()) for row in rows)


def main() -> None:
    """Run every kind in processes of its own, print tables and draw them."""
    parser = processes.parser(__doc__)
    parser.add_argument("--pictures", type=Path, help="folder for PNG files; made if needed")
    options = parser.parse_args()
    if options.pictures is not None and options.pictures.is_file():
        parser.error(f"--pictures={options.pictures} is a file. Name a folder")
    if options.configuration:
        print(json.dumps(measure(options.configuration)))
        return
    from lingvo_gpipe.console import units
    from lingvo_gpipe.run.profiles import picture
    from lingvo_gpipe.schedule import breakdown

    count = QUICK_ROUNDS if options.quick else ROUNDS
    print(machine.describe())
    print(f"the median of {STEPS} steps; rounds: {count}")
    found = processes.rounds("benchmarks.breakdown", KINDS, count)
    worst = {"rest": 0.0, "runtime": 0.0}
    for kind in KINDS:
        runs = processes.quiet(found[kind])
        devices = sorted(runs, key=lambda run: run["step_s"])[len(runs) // 2]["devices"]
        labels = [f"device {device}" for device in range(len(devices))]
        rows = breakdown.table_of(devices, labels)
        print(f"\n{kind}")
        print("\n".join(units.table(rows, "l" + "r" * (len(rows[0]) - 1))))
        for name in worst:
            worst[name] = max(worst[name], processes.median(runs, name))
        print(
            f"start and rest {processes.median(runs, 'rest'):.2%}, with transfer "
            f"{processes.median(runs, 'runtime'):.2%}; "
            f"step {processes.spread(runs, 'step_s')} s"
        )
        if options.pictures is not None:
            options.pictures.mkdir(parents=True, exist_ok=True)
            path = options.pictures / f"breakdown_{kind}.png"
            path.write_bytes(picture.of_breakdown(devices, labels))
    print(f"\n{PAPER}\nstart and rest: {worst['rest']:.1%} of a step at most")
    figure = f"start, transfer and rest {worst['runtime']:.1%} of a step"
    processes.conclude("breakdown", figure, f"at most {AIM:.0%}", found)


if __name__ == "__main__":
    main()
