"""Rows of ids from a long text."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe import input as input_lib

Array = np.ndarray[Any, Any]


class Tokens(input_lib.InMemory):
    """Rows of `length` ids each, cut from data_dir/SPLIT.npy, an array [n] of integers.

    Fields: target, label: [B, T] int32, label one id further; weight: [B, T] float32, all 1. What
    is left at the end of the text, less than a row, is not used.
    """

    class Params(input_lib.InMemory.Params):
        """Fields of Tokens."""

        data_dir: str = hyperparams.required("Folder with train.npy, test.npy and so on.")
        length: int = hyperparams.field(1024, "T, ids in a row.")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if params.length < 1:
            raise errors.InputError(f"input.length={params.length} is too small. Use 1 or more")

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        """Tell the fields of one example, from params alone."""
        sides = (self.params.length,)
        ids = tf.TensorSpec(sides, tf.int32)
        return {"target": ids, "label": ids, "weight": tf.TensorSpec(sides)}

    @functools.cache  # noqa: B019 (an input lives as long as its run)
    def arrays(self) -> Mapping[str, Mapping[str, Array]]:
        """Return split → field → array.

        Raises:
            InputError: the folder holds no such file, or one that is no array of ids.
        """
        folder = os.path.expanduser(self.params.data_dir)
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        files = [name for name in names if name.endswith(".npy")]
        if not files:
            raise errors.InputError(
                f"input.data_dir={folder!r} holds no .npy file. Write each split's ids there, as "
                "numpy.save('train.npy', ids)"
            )
        return {name.removesuffix(".npy"): self._rows(os.path.join(folder, name)) for name in files}

    def complete(self, task_params: Any) -> None:
        """Refuse ids that the model has no row for; see `Input.complete`."""
        sizes = [
            value
            for _, value, declared in task_params.model.iter_paths()
            if declared.name == "vocabulary"
        ]
        for split, fields in self.arrays().items() if sizes else ():
            # A label is the next target: the last one alone is new.
            for ids in (fields["target"], fields["label"][-1:]):
                least, most = int(ids.min(initial=0)), int(ids.max(initial=0))
                if least < 0 or most >= min(sizes):
                    raise errors.InputError(
                        f"{split}.npy in {self.params.data_dir} holds the id "
                        f"{least if least < 0 else most}, but the model has ids 0 to "
                        f"{min(sizes) - 1}. Give it a larger vocabulary, or other ids"
                    )

    def _rows(self, path: str) -> dict[str, Array]:
        try:
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise errors.InputError(f"{path} cannot be read: {error}") from error
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise errors.InputError(
                f"{path} holds {ids.dtype} {list(ids.shape)}, expected integers [n]. Save the ids "
                "of the whole text in one row"
            )
        length = self.params.length
        count = max(0, (len(ids) - 1) // length)
        target, label = (
            ids[start : start + count * length].reshape(count, length) for start in (0, 1)
        )
        return {
            "target": target,
            "label": label,
            "weight": np.broadcast_to(np.float32(1.0), target.shape),
        }
