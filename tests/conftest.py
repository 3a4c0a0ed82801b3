"""Gives every test process the same logical CPU devices and the same hypothesis settings."""

from __future__ import annotations

import os
import sys

import hypothesis
import pytest

NUM_LOGICAL_DEVICES = 8

# TensorFlow reads this when it is first imported, and says little afterwards.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# No deadline: how long an example takes is the machine's affair, not the test's.
hypothesis.settings.register_profile("project", deadline=None, derandomize=True)
hypothesis.settings.load_profile("project")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Split the CPU once all test modules are imported: after the first operation it is too late.

    A process whose tests do not import TensorFlow does not pay for it here.
    """
    del session
    if "tensorflow" not in sys.modules:
        return
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * NUM_LOGICAL_DEVICES
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how far the pipeline was from the plain network, over all points that were compared."""
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
