"""Python programs in processes of their own, which can import what the tests import."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

_HIDING = """
import sys
hidden = {hidden!r}
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ImportError(name + " is not there")
sys.meta_path.insert(0, Finder())
"""


def hiding(*packages: str) -> str:
    """Return the beginning of a program that cannot import some packages, its list `hidden`."""
    return _HIDING.format(hidden=list(packages))


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, **more}


def run(program: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program; `more` are variables of its environment."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
    )


def output(program: str, *arguments: str, **more: str) -> str:
    """Return what a program that ends well writes; see `run`."""
    found = run(program, *arguments, **more)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout
