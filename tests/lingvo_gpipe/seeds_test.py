"""Seeds: stable, stateless, different where they must differ."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import tensorflow as tf

from lingvo_gpipe import seeds


def test_path_hash_is_pinned() -> None:
    # A checkpoint is restored by another process, so these may never change.
    assert seeds.path_hash("block/conv") == 1954027986
    digest = hashlib.sha256(b"block/conv").digest()
    assert seeds.path_hash("block/conv") == int.from_bytes(digest[:4], "big") % 2**31
    assert seeds.variable_seed(3, "block/conv") == seeds.path_hash("3:block/conv")


def test_variables_and_runs_have_seeds_of_their_own() -> None:
    found = {seeds.variable_seed(seed, path) for seed in (0, 1, -1) for path in ("a", "a/b", "b")}
    assert len(found) == 9
    assert all(0 <= seed < 2**31 for seed in found)


def test_base_seed_takes_any_integer() -> None:
    values = (0, 1, -1, 2**31, 2**40 + 5, -(2**35))
    found = [tuple(seeds.base_seed(value).numpy().tolist()) for value in values]
    assert len(set(found)) == len(values)
    assert found[1] == (1, 0)
    assert found[3] == (0, 1)
    assert seeds.base_seed(7).dtype == tf.int32


def test_micro_batch_seed_is_a_fold_of_step_and_micro_batch() -> None:
    base = seeds.base_seed(11)
    wanted = tf.random.fold_in(tf.random.fold_in(base, 5), 2)
    np.testing.assert_array_equal(seeds.micro_batch_seed(base, tf.constant(5, tf.int64), 2), wanted)


def test_micro_batch_seeds_differ_by_run_step_and_micro_batch() -> None:
    found = {
        tuple(seeds.micro_batch_seed(seeds.base_seed(run), tf.constant(step), m).numpy().tolist())
        for run, step, m in itertools.product(range(3), range(4), range(4))
    }
    assert len(found) == 48


def test_fold_does_not_commute() -> None:
    base = seeds.base_seed(0)
    one, other = (seeds.fold(seeds.fold(base, a), b).numpy().tolist() for a, b in ((1, 2), (2, 1)))
    assert one != other
