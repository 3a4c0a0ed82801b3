"""Runs pytest on the file that a Bazel target names, and reports as Bazel expects it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


def arguments(argv: list[str]) -> list[str]:
    """Return pytest's arguments: those given, then what Bazel's test environment asks for."""
    given = list(argv)
    scratch = Path(os.environ["TEST_TMPDIR"])
    given += [f"--basetemp={scratch / 'pytest'}", f"--junitxml={os.environ['XML_OUTPUT_FILE']}"]
    # The newer form of the report has no room for the properties that sameness tests record.
    given += ["-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
    if only := os.environ.get("TESTBRIDGE_TEST_ONLY"):
        given += ["-k", only]
    return given


class _Deselected:
    """Counts the tests of a file that belong to a whole set only."""

    count = 0

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Add the tests that are left out."""
        self.count += len(items)


def run(argv: list[str]) -> int:
    """Run pytest; return its exit code, 0 too if all tests of the file belong to a whole set."""
    deselected = _Deselected()
    code = pytest.main(argv, plugins=[deselected])
    left_out = code == pytest.ExitCode.NO_TESTS_COLLECTED and deselected.count > 0
    return 0 if left_out else int(code)


if __name__ == "__main__":
    # Bazel sets no HOME, and the sources are read-only.
    os.environ.setdefault("HOME", os.environ["TEST_TMPDIR"])
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = os.path.join(os.environ["TEST_TMPDIR"], "hyp")
    sys.exit(run(arguments(sys.argv[1:])))
