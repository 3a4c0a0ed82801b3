"""Importing TensorFlow: when it is first used, and without the lines that it writes everywhere.

The import takes three seconds. A command that only shows a mistake should not wait for it, so the
modules that recipes import use TensorFlow and Keras inside functions alone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Its own deprecated functions, and what its checkpoints over several devices trace each time.
_OF_ITSELF = re.compile(r"\bis deprecated\b|\bDEPRECATED\b|MultiDeviceSaver.*retracing")
_NOISE = re.compile(r"I\d{4} |WARNING: All log messages before absl::InitializeLog")


_NAMES = ("tensorflow", "keras")

_deferred: dict[str, types.ModuleType] = {}
# What is called when TensorFlow is loaded.
_waiting: list[Callable[[], object]] = []


def defer() -> None:
    """Let `import tensorflow` and `import keras` wait until something of them is used.

    What is imported already stays as it is.
    """
    for name in _NAMES:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is not None:
            module = importlib.util.module_from_spec(spec)
            del module.__path__  # who imports a module inside it asks for this first
            module.__class__ = _Deferred
            sys.modules[name] = _deferred[name] = module


def is_deferred() -> bool:
    """Return whether TensorFlow is not loaded, but will be when it is first used."""
    return "tensorflow" in _deferred


def load(name: str) -> None:
    """Load a module whose import is deferred; nothing if none of this name is."""
    if name in _deferred:
        _load(_deferred[name])


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Let libraries that use TensorFlow only if it is imported find that it is not.

    TFDS finds a dataset without it in a tenth of the time.
    """
    for name in _deferred:
        sys.modules.pop(name, None)
    try:
        yield
    finally:
        for name, module in list(_deferred.items()):
            if sys.modules.setdefault(name, module) is not module:  # imported inside
                _load(module)


def quietly() -> None:
    """Import TensorFlow without the lines that it writes on any machine without a GPU.

    They bypass Python and every log level. Whatever is not of that kind is passed on. What
    TensorFlow logs later of its own functions, which no user calls, is left out too.

    Keras imports scikit-learn and pyplot, where they are installed, only to wrap models for the one
    and to show pictures by the other, and that is a third of the whole import. It finds neither
    here, so `keras.wrappers` and `keras.visualization` cannot be used afterwards.
    """
    with _quiet(), _without_collections():
        import tensorflow as tf

        tf.config.list_physical_devices()
    tf.get_logger().addFilter(_is_for_users)


def when_loaded(function: Callable[[], object]) -> None:
    """Call a function that uses TensorFlow: now, or when it is loaded if that is deferred."""
    if is_deferred():
        _waiting.append(function)
    else:
        function()


@contextlib.contextmanager
def loading_calls(function: Callable[[], object]) -> Iterator[None]:
    """Call a function as `when_loaded` does, but not if TensorFlow is loaded after the block."""
    when_loaded(function)
    try:
        yield
    finally:
        if function in _waiting:
            _waiting.remove(function)


if TYPE_CHECKING:
    import tensorflow as tf

    class Module(tf.Module):
        """A `tf.Module`."""

else:

    class _Base:
        """Python replaces no base that is `object` itself."""

    class Module(_Base):
        """A `tf.Module`, at the latest when TensorFlow is loaded: classes need not wait for it."""

        def __init_subclass__(cls, **kwargs: object) -> None:
            super().__init_subclass__(**kwargs)
            when_loaded(_complete_module)


def _complete_module() -> None:
    import tensorflow as tf

    if not issubclass(Module, tf.Module):
        Module.__bases__ = (tf.Module,)


class _Deferred(types.ModuleType):
    """A module that is loaded when one of its attributes is asked for.

    `importlib.util.LazyLoader` loads a module when it is imported for the second time.
    """

    def __getattr__(self, name: str) -> object:
        _load(self)
        return getattr(self, name)


def _load(module: types.ModuleType) -> None:
    name = module.__name__
    del _deferred[name]
    module.__class__ = types.ModuleType
    if sys.modules.setdefault(name, module) is module:
        with _quiet(), _without_collections():
            importlib.reload(module)
            if name == "tensorflow":
                module.config.list_physical_devices()  # looks for GPUs, and writes about it
    else:
        vars(module).update(vars(sys.modules[name]))
    while name == "tensorflow" and _waiting:
        _waiting.pop(0)()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Import what is imported inside without lines of no interest, and without what it tries."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            with _not_found("sklearn"), _not_found("matplotlib.pyplot"):
                yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            for line in file.read().decode(errors="replace").splitlines():
                if not _NOISE.match(line) and ("cuInit" not in line or _has_nvidia()):
                    sys.stderr.write(f"{line}\n")


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Import what is imported inside without Python's garbage collector, which visits none of it.

    What imports make stays. Visits take a fifth of TensorFlow's import, and a tenth of the
    processor time from there to the first step.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


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
