"""Rows of ids from a long text."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.input import Indexed, check_split
from lingvo_gpipe.input.serving import Serving


class Tokens(Indexed):
    """Rows of `length` ids each, cut from data_dir/SPLIT.npy, an array [n] of integers.

    Fields: target, label: [B, T] int32, label shifted by one id; weight: [B, T] float32, all 1. The
    incomplete row at the end of the text is not used.
    """

    class Params(Indexed.Params):
        """Fields of Tokens."""

        batch_size = hyperparams.required("Rows of `length` ids in a mini-batch of training.")
        data_dir: str = hyperparams.required("Folder with train.npy, test.npy and so on.")
        length: int = hyperparams.field(1024, "T: ids in a row.")

    params: Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        if params.length < 1:
            raise errors.InputError(f"input.length={params.length} is too small. Use 1 or more")

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        """Return the fields of one example, from params alone."""
        shape = (self.params.length,)
        ids = tf.TensorSpec(shape, tf.int32)
        return {"target": ids, "label": ids, "weight": tf.TensorSpec(shape)}

    def num_examples(self, split: str) -> int:
        """Return the number of rows of a split."""
        check_split(self.where, split, self._files)
        return max(0, len(self._ids(split)) - 1) // self.params.length

    def read(
        self, rows: tf.data.Dataset, split: str, batch_size: int, seed: int | None
    ) -> tf.data.Dataset:
        """Return mini-batches for `rows`; see `Indexed.read`. Memory holds a split's ids once."""
        del batch_size, seed
        length = self.params.length
        with tf.device("CPU:0"):
            used = self.num_examples(split) * length + 1
            ids = tf.convert_to_tensor(self._ids(split)[:used], tf.int32)

        @tf.autograph.experimental.do_not_convert
        def fields(row: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            places = row["index"][:, None] * length + tf.range(length + 1, dtype=tf.int64)
            row_ids = tf.gather(ids, places)
            target, label = row_ids[:, :-1], row_ids[:, 1:]
            return {"target": target, "label": label, "weight": tf.ones_like(label, tf.float32)}

        return rows.map(fields)

    def serving(self) -> Serving:
        """Return how an exported model is called: ids [N, T] → what the network makes of them."""
        return Serving({"target": tf.TensorSpec([None, self.params.length], tf.int32)}, dict)

    @functools.cached_property
    def _files(self) -> dict[str, str]:
        """Split → path of its ids."""
        folder = os.path.expanduser(self.params.data_dir)
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        files = {
            n.removesuffix(".npy"): os.path.join(folder, n) for n in names if n.endswith(".npy")
        }
        if not files:
            raise errors.InputError(
                f"input.data_dir={folder!r} has no .npy file. Write each split's ids there: "
                "numpy.save('train.npy', ids)"
            )
        return files

    @functools.cache  # noqa: B019 (an input lives as long as its run)
    def _ids(self, split: str) -> np.ndarray[Any, Any]:
        """Return the ids of a split, from the file where they lie."""
        path = self._files[split]
        try:
            ids = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError) as error:
            raise errors.InputError(
                f"{path} cannot be read: {error}. Write it again with numpy.save"
            ) from error
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise errors.InputError(
                f"{path} holds {ids.dtype} {list(ids.shape)}, expected integers [n]. Save the ids "
                "of the whole text in one row"
            )
        return ids
