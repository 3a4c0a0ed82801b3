"""A second implementation of AmoebaNet, only from published facts: the reference of the tests.

`Plain` computes it in plain TensorFlow from weights by path.
The wiring is transcribed independently, in the shorthand of the papers' figures, and uses nothing
from `lingvo_gpipe.tasks`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Five sums make states 2 to 6; the digits name the states that are concatenated.
CELLS = {
    ("A", "normal"): (
        "avg3(0)+max3(0) sep3(1)+none(1) none(0)+avg3(1) sep3(0)+sep5(2) avg3(5)+sep3(0)",
        "1346",
    ),
    ("A", "reduction"): (
        "sep3(1)+avg3(0) max3(0)+sep7(2) max3(1)+max3(0) sep3(4)+cross(0) avg3(1)+sep7(0)",
        "23456",
    ),
    ("B", "normal"): (
        "one(1)+max3(1) none(1)+sep3(0) one(1)+sep3(0) one(2)+none(2) avg3(1)+one(5)",
        "0346",
    ),
    ("B", "reduction"): (
        "max2(0)+max3(0) none(2)+three(1) sep5(2)+max3(2) none(3)+sep3(1) avg3(4)+one(3)",
        "56",
    ),
    ("D", "normal"): (
        "one(1)+max3(1) none(1)+cross(0) one(0)+cross(0) max3(2)+none(2) avg3(1)+one(5)",
        "0346",
    ),
    ("D", "reduction"): (
        "max2(0)+max3(0) none(2)+three(1) cross(2)+max3(2) none(3)+max2(1) avg3(2)+one(3)",
        "456",
    ),
}
STEM_FILTERS = 32


class Plain:
    """Operations in plain TensorFlow.

    Attributes:
        norm_inputs: path of a batch norm → the tensor that it normalised.
    """

    def __init__(
        self,
        weights: dict[str, tf.Tensor],
        epsilon: float,
        drop: Callable[[str, tf.Tensor], tf.Tensor] = lambda _, x: x,
    ) -> None:
        self.weights = weights
        self.epsilon = epsilon
        self.drop = drop
        self.norm_inputs: dict[str, tf.Tensor] = {}

    def relu(self, x: tf.Tensor) -> tf.Tensor:
        return tf.maximum(x, 0.0)

    def conv(
        self,
        path: str,
        x: Any,
        filters: int,
        size: Any = 1,
        strides: Any = 1,
        padding: str = "SAME",
    ) -> Any:
        kernel = self.weights[f"{path}/kernel"]
        height, width = size if isinstance(size, tuple) else (size, size)
        assert kernel.shape == (height, width, x.shape[-1], filters), path
        return tf.nn.conv2d(x, kernel, strides, padding)

    def separable(self, path: str, x: Any, filters: int, size: int, stride: int) -> Any:
        depthwise = self.weights[f"{path}/depthwise_kernel"]
        assert depthwise.shape == (size, size, x.shape[-1], 1), path
        y = tf.nn.depthwise_conv2d(x, depthwise, [1, stride, stride, 1], "SAME")
        pointwise = self.weights[f"{path}/pointwise_kernel"]
        assert pointwise.shape == (1, 1, x.shape[-1], filters), path
        return tf.einsum("bhwc,cd->bhwd", y, pointwise[0, 0])

    def norm(self, path: str, x: Any) -> Any:
        self.norm_inputs[path] = x
        mean, variance = tf.nn.moments(x, list(range(x.shape.rank - 1)))
        gamma, beta = self.weights[f"{path}/gamma"], self.weights[f"{path}/beta"]
        return (x - mean) / tf.sqrt(variance + self.epsilon) * gamma + beta

    def max_pool(self, x: Any, size: int, stride: int) -> Any:
        return tf.nn.max_pool2d(x, size, stride, "SAME")

    def avg_pool(self, x: Any, size: int, stride: int) -> Any:
        """Average pooling that ignores positions beyond the edge."""

        def total(value: Any) -> Any:
            pads, ends = [[0, 0]], []
            for side in value.shape[1:3]:
                out = -(-side // stride)
                pad = max((out - 1) * stride + size - side, 0)
                pads.append([pad // 2, pad - pad // 2])
                ends.append((out - 1) * stride + 1)
            wide = tf.pad(value, [*pads, [0, 0]])
            parts = [
                wide[:, i : i + ends[0] : stride, j : j + ends[1] : stride]
                for i in range(size)
                for j in range(size)
            ]
            return tf.add_n(parts)

        return total(x) / total(tf.ones_like(x))

    def add(self, a: Any, b: Any) -> Any:
        return a + b

    def concat(self, values: list[Any]) -> Any:
        return tf.concat(values, -1)

    def odd(self, x: Any) -> Any:
        """The image without its first row and column, with zeros added at the end."""
        return tf.pad(x[:, 1:, 1:], [[0, 0], [0, 1], [0, 1], [0, 0]])


def conv_norm(o: Plain, path: str, x: Any, filters: int, stride: int = 1, relu: bool = True) -> Any:
    x = o.relu(x) if relu else x
    return o.norm(f"{path}/norm", o.conv(f"{path}/conv", x, filters, 1, stride))


def factorized(o: Plain, path: str, x: Any, filters: int) -> Any:
    halves = [
        o.conv(f"{path}/path_{n}", part, filters // 2, 1, 2, "VALID")
        for n, part in ((1, x), (2, o.odd(x)))
    ]
    return o.norm(f"{path}/norm", o.concat(halves))


def fitted(o: Plain, path: str, x: Any, like: Any, filters: int, relu: bool) -> Any:
    if x.shape[1:3] != like.shape[1:3]:
        return factorized(o, f"{path}/reduce", o.relu(x) if relu else x, filters)
    return x if x.shape[-1] == filters else conv_norm(o, path, x, filters, relu=relu)


def bottleneck(o: Plain, path: str, kind: str, x: Any, filters: int, stride: int) -> Any:
    """A 3×3, or a 1×7 and a 7×1, on a quarter of the filters; on all if a quarter is zero."""
    inner, y = filters // 4 or filters, x
    if filters >= 4:
        y = o.norm(f"{path}/narrow_norm", o.conv(f"{path}/narrow_conv", o.relu(y), inner))
    if kind == "three":
        y = o.norm(f"{path}/norm", o.conv(f"{path}/conv", o.relu(y), inner, 3, stride))
    else:
        for size, strides in (((1, 7), (1, stride)), ((7, 1), (stride, 1))):
            name = f"{size[0]}x{size[1]}"
            y = o.conv(f"{path}/conv_{name}", o.relu(y), inner, size, strides)
            y = o.norm(f"{path}/norm_{name}", y)
    if filters >= 4:
        y = o.norm(f"{path}/widen_norm", o.conv(f"{path}/widen_conv", o.relu(y), filters))
    return y


def operation(o: Plain, path: str, kind: str, x: Any, filters: int, stride: int) -> Any:
    if kind == "none" and stride == 1 and x.shape[-1] == filters:
        return x
    if kind in ("one", "none"):
        y = conv_norm(o, path, x, filters, stride)
    elif kind in ("three", "cross"):
        y = bottleneck(o, path, kind, x, filters, stride)
    elif kind.startswith("sep"):
        y = x
        for number, step in ((1, stride), (2, 1)):
            size = int(kind.removeprefix("sep"))
            y = o.separable(f"{path}/separable_{number}", o.relu(y), filters, size, step)
            y = o.norm(f"{path}/norm_{number}", y)
    else:
        pool = o.max_pool if kind.startswith("max") else o.avg_pool
        y = pool(x, int(kind[-1]), stride)
        if x.shape[-1] != filters:
            y = conv_norm(o, path, y, filters, relu=False)
    return y if kind == "none" else o.drop(f"{path}/drop_path", y)


def cell(o: Plain, path: str, kind: tuple[str, str], filters: int, x: Any, previous: Any) -> Any:
    """Compute one cell; `path` ends in a slash or is empty."""
    sums, output = CELLS[kind]
    states = [conv_norm(o, f"{path}base", x, filters)]
    states.append(
        x if previous is None else fitted(o, f"{path}previous", previous, x, filters, relu=True)
    )
    for number, text in enumerate(sums.split(), 2):
        sides = []
        for side, (name, read) in zip(
            ("left", "right"), re.findall(r"(\w+)\((\d)\)", text), strict=True
        ):
            stride = 2 if kind[1] == "reduction" and int(read) < 2 else 1
            at = f"{path}state_{number}_{side}"
            sides.append(operation(o, at, name, states[int(read)], filters, stride))
        states.append(o.add(*sides))
    ends = [
        fitted(o, f"{path}output_{state}", states[int(state)], states[6], filters, relu=False)
        if state in "01"
        else states[int(state)]
        for state in output
    ]
    return o.concat(ends)


def network(
    o: Plain,
    genotype: str,
    num_cells: int,
    filters: int,
    stem: str,
    image: Any,
    last: str | None = None,
) -> Any:
    """Compute all cells, or those up to the one named `last`; return outputs by name, in order."""
    stride = 2 if stem == "imagenet" else 1
    x = o.conv("stem_conv/conv", image, STEM_FILTERS, 3, stride, "VALID")
    x = o.norm("stem_conv/norm", x)
    states, outputs = [None, x], {"stem_conv": x}

    def append(name: str, kind: str, width: int) -> None:
        y = cell(o, f"{name}/", (genotype, kind), width, states[-1], states[-2])
        states.append(y)
        outputs[name] = y

    if stem == "imagenet":
        append("stem_cell_0", "reduction", filters // 4)
        append("stem_cell_1", "reduction", filters // 2)
    for number in range(num_cells):
        for place in (1, 2):
            if number == place * num_cells // 3:
                filters *= 2
                append(f"reduction_{place - 1}", "reduction", filters)
        append(f"normal_{number}", "normal", filters)
        if f"normal_{number}" == last:
            break
    return outputs


def auxiliary(o: Plain, path: str, x: Any) -> Any:
    """Return the auxiliary head's logits."""
    x = o.relu(x)
    rows, columns = ((side - 5) // 3 + 1 for side in x.shape[1:3])
    x = tf.stack(
        [
            tf.stack(
                [
                    tf.reduce_mean(x[:, 3 * i : 3 * i + 5, 3 * j : 3 * j + 5], [1, 2])
                    for j in range(columns)
                ],
                1,
            )
            for i in range(rows)
        ],
        1,
    )
    x = o.relu(o.norm(f"{path}/narrow_norm", o.conv(f"{path}/narrow_conv", x, 51)))
    x = o.conv(f"{path}/whole_conv", x, 307, (rows, columns), 1, "VALID")[:, 0, 0]
    x = o.relu(o.norm(f"{path}/whole_norm", x))
    return tf.matmul(x, o.weights[f"{path}/softmax/kernel"]) + o.weights[f"{path}/softmax/bias"]
