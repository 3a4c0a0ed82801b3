"""Rows of ids from a long text."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, regular_files
from lingvo_gpipe.input import InMemory, Input, check_split
from lingvo_gpipe.input.serving import Serving

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task

Array = np.ndarray[Any, Any]


class Tokens(InMemory):
    """Rows of `length` ids each, cut from data_dir/SPLIT.npy, an array [n] of integers.

    Fields: target, label: [B, T] int32, label shifted by one id; weight: [B, T] float32, all 1. The
    incomplete row at the end of the text is not used.
    """

    class Params(InMemory.Params):
        """Fields of Tokens."""

        batch_size = hyperparams.required("Rows of `length` ids in a mini-batch of training.")
        data_dir: str = hyperparams.required("Folder with train.npy, test.npy and so on.")
        length: int = hyperparams.field(1024, "T: ids in a row.")

        def made(self, task_params: Task.Params) -> Input.Params:
            """Return params of made-up ids; see `Input.Params`."""
            from lingvo_gpipe.tasks.lm import made

            return made.params_like(self, task_params)

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

    @functools.cache  # noqa: B019 (an input lives as long as its run)
    def arrays(self) -> Mapping[str, Mapping[str, Array]]:
        """Return split → field → array.

        Raises:
            InputError: there is no such file, or it is not an array of ids.
        """
        length = self.params.length
        splits = {}
        for split, ids in self._texts.items():
            target, label = (shifted.reshape(-1, length) for shifted in (ids[:-1], ids[1:]))
            weight = np.broadcast_to(np.float32(1.0), target.shape)
            splits[split] = {"target": target, "label": label, "weight": weight}
        return splits

    def read(
        self, rows: tf.data.Dataset, split: str, batch_size: int, seed: int | None
    ) -> tf.data.Dataset:
        """Return mini-batches for `rows`; see `Indexed.read`. Memory holds a split's ids once."""
        del batch_size, seed
        length = self.params.length
        with tf.device("CPU:0"):
            ids = tf.convert_to_tensor(self._texts[split], tf.int32)

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
    def _texts(self) -> dict[str, Array]:
        """Split → the ids of all its rows in order, and the last row's last label."""
        folder = os.path.expanduser(self.params.data_dir)
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        files = [name for name in names if name.endswith(".npy")]
        if not files:
            raise errors.InputError(
                f"input.data_dir={folder!r} has no .npy file. Write each split's ids there: "
                "numpy.save('train.npy', ids)"
            )
        return {name.removesuffix(".npy"): self._ids(os.path.join(folder, name)) for name in files}

    def check_there(self, split: str | None = None) -> None:
        """Refuse a folder without the file of this split; see `Input.check_there`."""
        check_split(type(self).__name__, split or self.params.train_split, self._texts)

    def complete(self, task_params: Task.Params) -> None:
        """Refuse ids outside the model's vocabulary; see `Input.complete`."""
        sizes = [
            value
            for _, value, declared in task_params.model.iter_paths()
            if declared.name == "vocabulary"
        ]
        for split, ids in self._texts.items() if sizes else ():
            least, most = int(ids.min(initial=0)), int(ids.max(initial=0))
            if least < 0 or most >= min(sizes):
                raise errors.InputError(
                    f"{split}.npy in {self.params.data_dir} holds the id "
                    f"{least if least < 0 else most}, but the model has ids 0 to "
                    f"{min(sizes) - 1}. Use a larger vocabulary, or other ids"
                )

    def _ids(self, path: str) -> Array:
        try:
            regular_files.size_of(path)
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
        return ids[: max(0, len(ids) - 1) // self.params.length * self.params.length + 1]
