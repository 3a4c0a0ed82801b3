"""TensorBoard files of a run: scalars, the model's text, the schedule's picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors


class Writer:
    """Writes one run folder of TensorBoard; several under one logdir are shown side by side."""

    def __init__(self, folder: Path) -> None:
        """Write into `folder`, which is made when the first value comes.

        Raises:
            TrainingError: it cannot be written.
        """
        self._folder = folder
        try:
            self._writer = tf.summary.create_file_writer(str(folder))
        except tf.errors.OpError as error:
            raise errors.TrainingError(f"{folder} cannot be written: {error.message}") from error

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Write scalars under their names; vectors and matrices are left out."""
        with self._writer.as_default(step=step):
            for name, value in values.items():
                if np.ndim(value) == 0:
                    tf.summary.scalar(name, value)

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text as it stands, in a fixed-width block."""
        block = "\n".join(f"    {line}" for line in text.splitlines())
        with self._writer.as_default(step=step):
            tf.summary.text(name, block)

    def png(self, step: int, name: str, picture: bytes) -> None:
        """Write a picture from the bytes of its PNG file."""
        with self._writer.as_default(step=step):
            tf.summary.image(name, tf.io.decode_png(picture)[tf.newaxis])

    def flush(self) -> None:
        """Put what was written on disk."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()
