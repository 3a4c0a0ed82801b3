"""TensorBoard files of a run: scalars, texts and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging
from tensorboard.plugins.histogram import metadata

from lingvo_gpipe import errors
from lingvo_gpipe.run.views.histograms import Histogram


class Writer:
    """Writes one folder of TensorBoard; several in one logdir are shown side by side.

    If curves cannot be written (a full disk), this is logged once and the run continues without
    them.
    """

    def __init__(self, folder: Path) -> None:
        """Write into `folder`, which is created when the first value is written."""
        self._folder = folder
        self._writer: tf.summary.SummaryWriter = None
        self._is_broken = False
        self._do(self._open)

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Write scalars under their names; vectors and matrices are left out."""

        def write() -> None:
            for name, value in values.items():
                if np.ndim(value) == 0:
                    tf.summary.scalar(name, value)

        self._write(step, write)

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text unchanged, in a fixed-width block."""
        block = "\n".join(f"    {line}" for line in text.splitlines())
        self._write(step, lambda: tf.summary.text(name, block))

    def markdown(self, step: int, name: str, text: str) -> None:
        """Write a text in Markdown, such as a table."""
        self._write(step, lambda: tf.summary.text(name, text))

    def png(self, step: int, name: str, picture: bytes) -> None:
        """Write a picture from the bytes of its PNG file."""
        self._write(step, lambda: tf.summary.image(name, tf.io.decode_png(picture)[tf.newaxis]))

    def images(self, step: int, name: str, images: tf.Tensor) -> None:
        """Write images, uint8 [n, H, W, C], side by side."""
        self._write(step, lambda: tf.summary.image(name, images, max_outputs=len(images)))

    def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
        """Write histograms under their names."""
        about = metadata.create_summary_metadata(display_name=None, description=None)

        def write() -> None:
            for name, one in values.items():
                rows = np.stack([one.edges[:-1], one.edges[1:], one.counts], axis=1)
                tf.summary.write(name, tf.constant(rows), metadata=about)

        self._write(step, write)

    def flush(self) -> None:
        """Flush what was written to the disk."""
        self._do(lambda: self._writer.flush())

    def close(self) -> None:
        """Write what is left and close the file."""
        self._do(lambda: self._writer.close())

    def _open(self) -> None:
        self._writer = tf.summary.create_file_writer(str(self._folder))

    def _write(self, step: int, write: Callable[[], object]) -> None:
        def within() -> None:
            with self._writer.as_default(step=step):
                write()

        self._do(within)

    def _do(self, action: Callable[[], object]) -> None:
        if self._is_broken:
            return
        try:
            action()
        except tf.errors.OpError as error:
            self._is_broken = True
            reason = errors.without_graph_names(error.message).splitlines()[0]
            logging.warning("TensorBoard receives no more curves of this run: %s", reason)
