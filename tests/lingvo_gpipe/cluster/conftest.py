"""The run that tests of supervisors disturb."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lingvo_gpipe.cluster.runs import Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.end()
    left = list(made.temporary.iterdir())
    assert len(left) <= 1  # of a supervisor that was killed, until the next one starts
