"""A Bazel target whose tests all belong to a whole set passes; one without tests does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from tools.bazel import pytest_main
sys.exit(pytest_main.run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import pytest\n@pytest.mark.{mark}\ndef test_it():\n    assert False\n", 0),
        ("import pytest\n@pytest.mark.{mark}\ndef test_it(): pass\ndef test(): assert False\n", 1),
        ("import pytest\n", 5),
    ],
    ids=["all left out", "one fails", "none there"],
)
def test_a_file_whose_tests_are_left_out_passes(tmp_path: Path, text: str, code: int) -> None:
    file = tmp_path / "some_test.py"
    file.write_text(text.format(mark="sameness_grid"))
    configured = [f"--rootdir={tmp_path}", "-c", str(ROOT / "pyproject.toml"), str(file)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *configured, "-p", "no:cacheprovider", "-q"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
