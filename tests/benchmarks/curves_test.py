"""Curves of runs are read, printed and drawn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import curves
from lingvo_gpipe.run import tensorboard


def write(logdir: Path, accuracies: tuple[float, float]) -> None:
    for folder, tag, values in (("train", "loss", (2.0, 1.0)), ("eval", "accuracy", accuracies)):
        writer = tensorboard.Writer(logdir / folder)
        for step, value in zip((10, 20), values, strict=True):
            writer.scalars(step, {tag: value})
        writer.text(0, "params", "a text")
        writer.close()


def test_log_directories_are_read_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write(tmp_path / "run", (0.5, 0.25))
    write(tmp_path / "other", (0.25, 0.75))
    runs = [f"K=2={tmp_path}/run", f"other={tmp_path}/other"]
    monkeypatch.setattr(sys, "argv", ["curves", f"{tmp_path}/c.png", "--tokens=1,4", *runs])
    curves.main()
    _, *lines = capsys.readouterr().out.splitlines()
    ends = [line.split("\t") for line in lines]
    assert ends[0][:2] + ends[0][3:] == ["K=2", "20", "0.2500", "0.2500", "0.5000"]
    assert ends[1][:2] + ends[1][3:] == ["other", "80", "0.7500", "0.2500", "0.7500"]
    assert all(0 <= float(minutes) < 5 for _, _, minutes, *_ in ends)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    for wrong, message in (("--tokens=1,2,3", "3 numbers for 2 runs"), ("--tag=x", "has no 'x'")):
        monkeypatch.setattr(sys, "argv", ["curves", f"{tmp_path}/c.png", wrong, *runs])
        with pytest.raises(SystemExit):
            curves.main()
        assert message in capsys.readouterr().err
