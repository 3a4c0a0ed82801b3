"""A made-up text of ids."""

from __future__ import annotations

import functools
import zlib

import numpy as np

from lingvo_gpipe import hyperparams
from lingvo_gpipe.input import made
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.lm.input import Array, Tokens

_VOCABULARY = 1000


class MadeTokens(made.Made, Tokens):
    """Ids each of which is one or two above the last, in a circle."""

    contents = "ids, each one or two above the last"

    class Params(made.Made.Params, Tokens.Params):
        """Params of MadeTokens."""

        data_dir = ""
        vocabulary: int = hyperparams.required("Number of ids.")
        examples: int = hyperparams.required("Rows to train on.")
        held_out: int = hyperparams.required("Rows of each other split.")
        splits: tuple[str, ...] = hyperparams.required("Names of the splits.")

    params: Params

    @functools.cached_property
    def _texts(self) -> dict[str, Array]:
        """Split → the ids of all its rows in order, and the last row's last label."""
        texts = {}
        for split in self.params.splits:
            is_training = split == self.params.train_split
            rows = self.params.examples if is_training else self.params.held_out
            random = np.random.RandomState(zlib.crc32(split.encode()))
            steps = random.randint(1, 3, rows * self.params.length + 1)
            texts[split] = (np.cumsum(steps) % self.params.vocabulary).astype(np.int32)
        return texts


def params_like(params: Tokens.Params, task_params: Task.Params) -> MadeTokens.Params:
    """Return params of made ids in place of others; see `Input.Params.made`."""
    return made.like(
        MadeTokens.Params,
        params,
        data_dir="",
        vocabulary=made.size_of(task_params, "vocabulary") or _VOCABULARY,
        splits=tuple(sorted({params.train_split, "test", task_params.eval.split})),
        **made.num_examples(params),
    )
