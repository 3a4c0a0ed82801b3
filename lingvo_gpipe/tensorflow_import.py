"""Importing TensorFlow without the lines that it writes on any machine."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Its own deprecated functions, and what its checkpoints over several devices trace each time.
_OF_ITSELF = re.compile(r"\bis deprecated\b|\bDEPRECATED\b|MultiDeviceSaver.*retracing")
_NOISE = re.compile(r"I\d{4} |WARNING: All log messages before absl::InitializeLog")


def quietly() -> None:
    """Import TensorFlow without the lines that it writes on any machine without a GPU.

    They bypass Python and every log level. Whatever is not of that kind is passed on. What
    TensorFlow logs later of its own functions, which no user calls, is left out too.

    Keras imports scikit-learn and pyplot, where they are installed, only to wrap models for the one
    and to show pictures by the other, and that is a third of the whole import. It finds neither
    here, so `keras.wrappers` and `keras.visualization` cannot be used afterwards.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            with _not_found("sklearn"), _not_found("matplotlib.pyplot"):
                import tensorflow as tf

            tf.config.list_physical_devices()
            tf.get_logger().addFilter(_is_for_users)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            for line in file.read().decode(errors="replace").splitlines():
                if not _NOISE.match(line) and ("cuInit" not in line or _has_nvidia()):
                    sys.stderr.write(f"{line}\n")


@contextlib.contextmanager
def _not_found(module: str) -> Iterator[None]:
    """Let imports of a module fail, unless it is imported already."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


def _is_for_users(record: logging.LogRecord) -> bool:
    return not _OF_ITSELF.search(record.getMessage())


def _has_nvidia() -> bool:
    return Path("/dev/nvidiactl").exists()
