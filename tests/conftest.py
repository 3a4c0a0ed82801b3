"""Same devices, same kernels and same hypothesis settings in every test process; bounded memory."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support import custom_gradients

NUM_LOGICAL_DEVICES = 9
GROWTH_BYTES = 512 * 2**20

# TensorFlow reads this when it is first imported, and logs little afterwards.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# By default only some CPUs use oneDNN, and only its allocator reports what it allocates.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

# What LLVM optimizes shows nothing about our layers, and costs a third of a compilation.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# What test modules and TensorFlow import stays: visits to it are a fifth of the time of imports.
gc.disable()

# No deadline: how long an example takes depends on the machine, not on the test.
hypothesis.settings.register_profile("project", deadline=None, derandomize=True)
hypothesis.settings.load_profile("project")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Split the CPU once all test modules are imported: after the first operation it is too late.

    A process whose tests do not import TensorFlow does not import it here either.
    """
    del session
    # Later collections need not visit what was imported; and there need not be many, because
    # `_Memory` collects, too.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    if "tensorflow" not in sys.modules:
        return
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * NUM_LOGICAL_DEVICES
    )
    _one_stack_for_all_operations()


def _one_stack_for_all_operations() -> None:
    """Let TensorFlow note one stack of Python calls, where it notes one for each operation.

    It shows where an operation was made when it fails, and no test looks at that. Pytest's calls
    are half of a stack, and collecting it is a tenth of the time of tests that trace.
    """
    from tensorflow.python.util import tf_stack

    stack = tf_stack.extract_stack()
    tf_stack.extract_stack = lambda stacklevel=1: stack  # noqa: ARG005


class _Memory:
    """Frees the memory of finished tests: after each `GROWTH_BYTES`, or half of it between files.

    Graphs are reference cycles of many small objects: few collections come to them, and the
    allocator keeps their pages.
    """

    def __init__(self) -> None:
        self._kept_bytes = 0
        self._file = ""

    def pytest_runtest_logstart(self, location: tuple[str, int | None, str]) -> None:
        if location[0] != self._file:
            self._file = location[0]
            if "tensorflow" in sys.modules:
                custom_gradients.forget()
                _clear_kernels()
            self._free(GROWTH_BYTES // 2)

    def pytest_runtest_logfinish(self) -> None:
        self._free(GROWTH_BYTES)

    def _free(self, growth_bytes: int) -> None:
        """Free memory if this process has grown by that many bytes."""
        if _resident_bytes() < self._kept_bytes + growth_bytes:
            return
        if "tensorflow" in sys.modules:
            _clear_kernels()
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        self._kept_bytes = _resident_bytes()


def _clear_kernels() -> None:
    """Clear TensorFlow's cache: the kernel of every function and operation that was called."""
    from tensorflow.python.eager import context

    context.context().clear_kernel_cache()


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * resource.getpagesize() if pages.exists() else 0


@pytest.fixture(scope="session", autouse=True)
def _temporary_files_below_pytest_s(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what libraries leave behind together: TFDS, a folder for each unprepared dataset."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def _drawn_once() -> Iterator[None]:
    """Draw each schedule once: runs draw theirs, and most tests' runs have one of a few."""
    from lingvo_gpipe.schedule import drawing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "draw", functools.cache(drawing.draw))
        yield


@pytest.fixture(scope="session", autouse=True)
def _measured_by_single_calls() -> Iterator[None]:
    """Measure programs by graphs of one call: those of the smallest networks have 64 otherwise."""
    if "tensorflow" not in sys.modules:
        yield
        return
    from lingvo_gpipe.plan import measuring

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_LONG_S", 0.0)
        yield


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Memory())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report what the whole sets found: errors of gradients, damaged files."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "damaged_files":
                terminalreporter.write_line(str(value))
    errors = [
        value
        for report in terminalreporter.stats.get("passed", [])
        for name, value in report.user_properties
        if name == "sameness_error"
    ]
    if errors:
        terminalreporter.write_line(
            f"sameness: {len(errors)} points, worst relative error of a gradient {max(errors):.1e}"
        )
