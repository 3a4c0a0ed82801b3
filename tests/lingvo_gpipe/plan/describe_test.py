from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe import layers
from lingvo_gpipe.plan import describe
from tests import tiny_task
from tests.lingvo_gpipe.plan.networks import floats, pipe


def number(text: str, name: str) -> int | None:
    """Return the number after `name` on its line."""
    found = [line for line in text.splitlines() if line.startswith(f"{name}: ")]
    return int(found[0].removeprefix(f"{name}: ")) if found else None


def language_model(depth: int, units: int, vocabulary: int, partitions: int) -> Any:
    return pipe(
        layers.Embedding.Params(vocabulary=vocabulary, units=units, reads=("ids",)),
        *(
            layers.TransformerLayer.Params(units=units, heads=16, hidden=4 * units)
            for _ in range(depth)
        ),
        layers.SequenceSoftmax.Params(
            vocabulary=vocabulary, reads=("x", "label"), tie={"kernel": "embedding/table"}
        ),
        num_partitions=partitions,
        num_micro_batches=partitions,
    )


IDS = {"ids": tf.TensorSpec([256, 16], tf.int32), "label": tf.TensorSpec([256, 16], tf.int32)}


def test_parameters_are_those_of_inference_and_the_rest_has_separate_lines() -> None:
    text = describe.describe_network(
        pipe(
            layers.Dense.Params(name="stem", units=5, trainable=False),
            layers.BatchNorm.Params(name="norm"),
            layers.Dense.Params(
                name="auxiliary", units=2, training_only=True, writes=("side",), use_bias=False
            ),
            layers.MeanSquaredError.Params(
                name="side_loss", reads=("side", "side_target"), writes=("side",), loss_name="side"
            ),
            layers.Dense.Params(name="head", units=3),
            outputs=("x", "side"),
        ),
        {"x": floats(4, 7), "side_target": floats(4, 2)},
    )
    assert number(text, "parameters") == 2 * 5 + 5 * 3 + 3
    assert number(text, "auxiliary parameters") == 5 * 2
    assert number(text, "frozen parameters") == 7 * 5 + 5
    assert number(text, "statistics") == 2 * 5
    assert "used by training only" in text
    assert "frozen" in text


def test_lines_of_what_is_not_there_are_left_out() -> None:
    text = describe.describe_network(pipe(layers.Dense.Params(units=3)), {"x": floats(4, 7)})
    assert number(text, "parameters") == 7 * 3 + 3
    for name in ("auxiliary parameters", "frozen parameters", "statistics"):
        assert number(text, name) is None


def test_tied_parameters_count_once() -> None:
    text = describe.describe_network(language_model(1, 32, 100, 1), IDS)
    attention = 4 * (32 * 32 + 32) + 2 * 32
    feed_forward = 32 * 128 + 128 + 128 * 32 + 32 + 2 * 32
    assert number(text, "parameters") == 100 * 32 + attention + feed_forward + 100
    assert "kernel is tied to embedding/table" in text


def test_a_table_that_inference_uses_too_is_no_auxiliary_one() -> None:
    text = describe.describe_network(
        pipe(
            layers.Embedding.Params(vocabulary=9, units=4, reads=("ids",)),
            layers.SequenceSoftmax.Params(
                vocabulary=9,
                reads=("x", "label"),
                tie={"kernel": "embedding/table"},
                training_only=True,
            ),
        ),
        IDS,
    )
    assert number(text, "parameters") == 9 * 4
    assert number(text, "auxiliary parameters") == 9


def test_what_is_inside_a_layer_is_shown_once_for_equal_layers() -> None:
    text = describe.describe_network(language_model(6, 32, 100, 2), IDS)
    rows = text.splitlines()
    assert sum("MultiHeadAttention" in row for row in rows) == 1
    assert sum("× TransformerLayer" in row for row in rows) == 2
    assert max(map(len, rows)) <= 100


def test_equal_layers_of_which_one_is_frozen_do_not_share_a_line() -> None:
    text = describe.describe_network(
        pipe(
            layers.Dense.Params(name="a", units=5),
            layers.Dense.Params(name="b", units=5),
            frozen=("b/*",),
        ),
        {"x": floats(4, 5)},
    )
    assert number(text, "parameters") == 30
    assert number(text, "frozen parameters") == 30
    assert [line.split()[0] for line in text.splitlines() if " Dense " in line] == ["a", "b"]


def test_a_model_of_84_billion_parameters_is_described() -> None:
    text = describe.describe_network(language_model(1661, 2048, 32000, 128), IDS)
    layer = 4 * (2048**2 + 2048) + 2 * 2048 * 8192 + 8192 + 2048 + 4 * 2048
    assert number(text, "parameters") == 1661 * layer + 32000 * 2048 + 32000
    assert max(map(len, text.splitlines())) <= 100


def test_a_task_is_described_by_its_input_alone() -> None:
    text = describe.describe(tiny_task.tiny_task())
    assert number(text, "parameters") == 4 * 8 + 8 + 2 * 8 + 8 * 3 + 3
    assert number(text, "statistics") == 2 * 8
    assert "input point: [8, 4] float32" in text
