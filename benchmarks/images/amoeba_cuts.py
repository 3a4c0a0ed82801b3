"""How well balanced are AmoebaNet-D(18, 256)'s cells: cut by FLOPs, by measured time, by hand?

`python -m benchmarks.images.amoeba_cuts [SIZE [FILTERS]]`: profiles every layer once, one image of
SIZE² pixels (224) a micro-batch, and prints a table in Markdown. A cell's cost is forward,
recomputation and backward; the heaviest share of all, 1/K at best, bounds what K devices can gain.
The cuts by hand are torchgpipe's, of a network of as many layers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

CELLS, FILTERS, SIZE, CLASSES = 18, 256, 224, 1000
BY_HAND = {2: (9, 15), 4: (3, 6, 7, 8), 8: (2, 2, 2, 3, 3, 4, 4, 4)}


def network(filters: int) -> Any:
    """Return the network's params, uncut."""
    from lingvo_gpipe import pipelining
    from lingvo_gpipe.tasks.image.model import amoebanet

    return pipelining.PipeliningLayer.Params(
        layers=amoebanet.amoeba_net(
            amoebanet.AmoebaNet(genotype="D", num_cells=CELLS, filters=filters, classes=CLASSES)
        )
    )


def layer_costs(params: Any, fields: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return per layer (FLOPs, measured seconds) of forward, recomputation and backward."""
    from lingvo_gpipe import network
    from lingvo_gpipe.plan import profiling

    layers = network.analyze(params, fields).layers
    flops = [2.0 * info.meta.flops_forward + info.meta.flops_backward for info in layers]
    times = profiling.layer_times(params, fields)
    return flops, [time.forward_s + time.recompute_s + time.backward_s for time in times]


def rows(flops: Sequence[float], seconds: Sequence[float]) -> list[str]:
    """Return the table's rows: for each K three cuts, and their heaviest cells' shares."""
    from lingvo_gpipe.network.cutting import partition

    rows_of_text = []
    for count, by_hand in BY_HAND.items():
        cuts = {
            "plan, by FLOPs": partition.partition(flops, count),
            "plan, by time": partition.partition(seconds, count),
            "by hand (torchgpipe)": by_hand,
        }
        for name, cut in cuts.items():
            shares = (partition.heaviest_share(costs, cut) for costs in (flops, seconds))
            percents = " | ".join(f"{100 * share:.1f} %" for share in shares)
            rows_of_text.append(f"| {count} | {name} | {', '.join(map(str, cut))} | {percents} |")
    return rows_of_text


def main() -> None:
    """Profile the layers and print the table."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    from benchmarks.support import machine

    size, filters = (*map(int, sys.argv[1:]), *(SIZE, FILTERS)[len(sys.argv) - 1 :])
    fields = {
        "image": tf.TensorSpec([1, size, size, 3]),
        "label": tf.TensorSpec([1], tf.int32),
    }
    load = machine.Load()
    flops, seconds = layer_costs(network(filters), fields)
    print(machine.describe())
    print(
        f"AmoebaNet-D({CELLS}, {filters}), {len(flops)} layers, one image of {size}² at a time; "
        f"others used {load.stop():.2f} cores meanwhile"
    )
    print()
    print("| K | cut | layers per cell | heaviest cell, FLOPs | heaviest cell, time |")
    print("|---|---|---|---|---|")
    print("\n".join(rows(flops, seconds)))


if __name__ == "__main__":
    main()
