"""Stateless seeds, derived from what they are used for.

The random numbers of a layer depend on (seed, step, global micro-batch, the layer's path), never on
the partition, the schedule or the device: recomputation and every cut draw the same numbers.
`tf.random.fold_in` is the standard way to derive one key from another.
"""

from __future__ import annotations

import hashlib

import tensorflow as tf


def path_hash(path: str) -> int:
    """Return a stable hash of `path` in [0, 2^31), equal on every machine and Python."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") & 0x7FFFFFFF


def variable_seed(seed: int, path: str) -> int:
    """Return the seed in [0, 2^31) from which the variable at `path` is initialised."""
    return path_hash(f"{seed}:{path}")


def base_seed(seed: int) -> tf.Tensor:
    """Return `seed` (any Python integer) as the int32 [2] tensor that everything folds into."""
    low, high = seed & 0x7FFFFFFF, (seed >> 31) & 0x7FFFFFFF
    return tf.constant([low, high], tf.int32)


def fold(seed: tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
    """Derive a new int32 [2] seed from `seed` and one integer."""
    return tf.random.fold_in(seed, tf.cast(number, tf.int32), alg="auto_select")


def micro_batch_seed(seed: tf.Tensor, step: tf.Tensor, micro_batch: int | tf.Tensor) -> tf.Tensor:
    """Return the int32 [2] seed of one micro-batch of one update.

    Args:
        seed: int32 [2], of the run (`base_seed`).
        step: integer scalar, the update's number.
        micro_batch: integer, counted over the whole update (accumulation included).
    """
    return fold(fold(seed, step), micro_batch)
