from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support import scalars
from benchmarks.translation import curves
from lingvo_gpipe.run import tensorboard


def written(folder: Path, *points: tuple[int, float]) -> None:
    for name in ("train", "eval"):
        writer = tensorboard.Writer(folder / name)
        for step, value in points:
            writer.scalars(step, {"loss": value, "log_perplexity": value + 1})
        writer.text(0, "params", "a text")
        writer.close()


def test_runs_are_read_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    written(tmp_path / "small", (10, 2.0), (20, 1.0), (30, 1.5))
    written(tmp_path / "large", (5, 3.0))
    found = scalars.read(tmp_path / "small" / "eval")
    assert set(found) == {"loss", "log_perplexity"}
    assert [(p.step, p.value) for p in found["loss"]] == [(10, 2.0), (20, 1.0), (30, 1.5)]
    runs = [f"{name}={tmp_path / name}" for name in ("small", "large")]
    monkeypatch.setattr(sys, "argv", ["curves", f"{tmp_path}/c.png", "--tokens=4,16", *runs])
    curves.main()
    _, small, large = capsys.readouterr().out.splitlines()
    (*one, minutes, least), (*other, _, only) = small.split("\t"), large.split("\t")
    assert (one, least, other, only) == (
        ["small", "30", "120"],
        "2.5000",
        ["large", "5", "80"],
        "4.0000",
    )
    assert float(minutes) < 5
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    for wrong, message in (("--tokens=1,2,3", "3 numbers for 2 runs"), ("--tag=x", "has no 'x'")):
        monkeypatch.setattr(sys, "argv", ["curves", f"{tmp_path}/c.png", wrong, *runs])
        with pytest.raises(SystemExit):
            curves.main()
        assert message in capsys.readouterr().err
