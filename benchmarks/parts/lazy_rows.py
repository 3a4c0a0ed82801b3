"""How long does an update of a table take if only its touched rows change?

`python -m benchmarks.parts.lazy_rows`: one table of 200,000 x 512 in float32, on one device, of
which 4,096 rows have a gradient, or all. The updates are those of `optim.Updater` with the finite
guard: all rows; touched rows by masks over the whole table; touched rows alone, which is what
`Optimizer.Params.lazy` does for rules that are elementwise. They take turns in one process.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

ROWS, UNITS, TOUCHED = 200_000, 512, 4_096
ROUNDS = 7
RULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Adam", {}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
)
KINDS = ("all rows", "masked", "only rows")


def updates(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return kind → a function of a gradient that updates a table of its own."""
    import tensorflow as tf

    from lingvo_gpipe import optim
    from lingvo_gpipe.layers import base

    made = {}
    for kind in KINDS:
        table = tf.Variable(tf.random.stateless_normal([ROWS, UNITS], [1, 2]))
        spec = base.VariableSpec("table", (ROWS, UNITS), tf.float32, base.initializer("zeros"))
        updater = optim.Updater.Params(
            optimizer=optim.Optimizer.Params(
                name=name,
                config=config,
                learning_rate=0.01,
                lazy=() if kind == "all rows" else ("table",),
            )
        ).instantiate(
            variables={"table": table},
            specs={"table": spec},
            device_of=lambda _: "CPU:0",
            layer_of=lambda path: path,
        )
        if kind == "masked":
            rule = updater.optimizer.rule
            rule.__class__ = type("Masked", (type(rule),), {"is_elementwise": False})
        made[kind] = tf.function(
            lambda gradient, updater=updater: updater.apply(
                {"table": gradient}, step=tf.constant(0, tf.int64)
            )["finite"],
            autograph=False,
        )
    return made


def main() -> None:
    """Time the kinds in turn, and print a table."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    from benchmarks.support import machine

    print(machine.describe())
    print(
        f"table [{ROWS}, {UNITS}] in float32; ms per update, medians of {ROUNDS} interleaved "
        "rounds; speedup of only rows over the others: medians of pairs"
    )
    numbers = tf.range(TOUCHED, dtype=tf.int64)[:, tf.newaxis] * (ROWS // TOUCHED)
    few = tf.scatter_nd(
        numbers, tf.random.stateless_normal([TOUCHED, UNITS], [3, 4]), [ROWS, UNITS]
    )
    gradients = {TOUCHED: few, ROWS: tf.random.stateless_normal([ROWS, UNITS], [5, 6])}
    for name, config in RULES:
        functions = updates(name, config)
        for count, gradient in gradients.items():
            load = machine.Load()
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for turn in range(ROUNDS + 1):
                for kind in KINDS:
                    start = time.perf_counter()
                    functions[kind](gradient).numpy()
                    if turn:  # the first one traces
                        times[kind].append(1e3 * (time.perf_counter() - start))
            row = ", ".join(f"{kind} {statistics.median(times[kind]):.0f}" for kind in KINDS)
            gain = {
                kind: statistics.median(
                    one / other for one, other in zip(times[kind], times["only rows"], strict=True)
                )
                for kind in KINDS[:2]
            }
            print(
                f"{name} {config or ''} {count} rows touched: {row}; speedup over all rows "
                f"{gain['all rows']:.2f}, over masked {gain['masked']:.2f}; other load "
                f"{load.stop():.2f} cores",
                flush=True,
            )


if __name__ == "__main__":
    main()
