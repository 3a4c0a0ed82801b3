"""Curves of runs and of tables are read, printed and drawn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import curves
from lingvo_gpipe.run import tensorboard


def test_log_directories_and_tables_are_read_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for folder, tag, values in (("train", "loss", (2.0, 1.0)), ("eval", "accuracy", (0.5, 0.25))):
        writer = tensorboard.Writer(tmp_path / "run" / folder)
        for step, value in zip((10, 20), values, strict=True):
            writer.scalars(step, {tag: value})
        writer.text(0, "params", "a text")
        writer.close()
    table = tmp_path / "table.tsv"
    table.write_text("step\tseconds\taccuracy\n5\t60\t0.25\n9\t90\t0.75\n", encoding="ascii")
    runs = [f"K=2={tmp_path}/run", f"other={table}"]
    monkeypatch.setattr(sys, "argv", ["curves", f"{tmp_path}/c.png", "--tokens=1,4", *runs])
    curves.main()
    _, of_run, of_table = capsys.readouterr().out.splitlines()
    name, updates, minutes, *numbers = of_run.split("\t")
    assert (name, updates, numbers) == ("K=2", "20", ["0.2500", "0.2500", "0.5000"])
    assert float(minutes) < 5
    assert of_table.split("\t") == ["other", "36", "1.5", "0.7500", "0.2500", "0.7500"]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    for wrong, message in (("--tokens=1,2,3", "3 numbers for 2 runs"), ("--tag=x", "has no 'x'")):
        monkeypatch.setattr(sys, "argv", ["curves", f"{tmp_path}/c.png", wrong, *runs])
        with pytest.raises(SystemExit):
            curves.main()
        assert message in capsys.readouterr().err
