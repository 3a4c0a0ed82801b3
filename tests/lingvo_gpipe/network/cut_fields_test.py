"""Tests of fields that are cut where they are read."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.network.cut_fields import CutFields

_X, _TABLE = 3, 4  # versions


@pytest.fixture
def fields() -> CutFields:
    """Return the fields of ten examples, those of two replicas, with a table for all examples."""
    table = tf.ones([5, 2])
    pieces = [
        {_X: {"number": tf.range(6)}, _TABLE: table},
        {_X: {"number": tf.range(6, 10)}, _TABLE: table},
    ]
    return CutFields(pieces, [(3, 3), (2, 2)], 0, {_TABLE})


def _numbers(fields: CutFields) -> list[list[int]]:
    return [value["number"].numpy().tolist() for value in fields.of_version(_X)]


def test_pieces_are_cut_into_the_micro_batches_of_all(fields: CutFields) -> None:
    assert _numbers(fields) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


def test_a_piece_has_the_micro_batches_of_its_replica(fields: CutFields) -> None:
    assert _numbers(fields.piece(1)) == [[6, 7], [8, 9]]


def test_unbatched_fields_are_whole_in_every_micro_batch(fields: CutFields) -> None:
    cut = fields.of_version(_TABLE)
    assert [value.shape for value in cut] == [[5, 2]] * 4
    np.testing.assert_array_equal(cut[3], np.ones([5, 2]))


def test_other_versions_are_no_fields(fields: CutFields) -> None:
    assert _X in fields
    assert 5 not in fields


def test_the_current_device_cuts() -> None:
    graph = tf.Graph()
    with graph.as_default():
        whole = tf.compat.v1.placeholder(tf.float32, [4, 2])
        with tf.device("/cpu:1"):
            cut = CutFields([{_X: whole}], [(2, 2)], 0, ()).of_version(_X)
    assert {value.device for value in cut} == {"/device:CPU:1"}
