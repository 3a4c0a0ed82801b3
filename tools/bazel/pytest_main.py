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


if __name__ == "__main__":
    # Bazel sets no HOME, and the sources are read-only.
    os.environ.setdefault("HOME", os.environ["TEST_TMPDIR"])
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = os.path.join(os.environ["TEST_TMPDIR"], "hyp")
    sys.exit(pytest.main(arguments(sys.argv[1:])))
