"""A CSV log has one row per step, whatever ends a run and whichever metrics it has."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from lingvo_gpipe import errors, hooks
from lingvo_gpipe.hooks.table import Table
from lingvo_gpipe.run import loop
from tests.support.saved import forget
from tests.tiny_task import one_layer_task, stop_after


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_resumed_run_continues_its_files(tmp_path: Path) -> None:
    params = one_layer_task(max_steps=6, save_interval_steps=2, log_interval_steps=1)
    params.train.hooks = (hooks.CSVLog.Params(),)
    loop.run(params, tmp_path / "whole", evaluate=True)
    folder = tmp_path / "parts"
    cut = loop.run(params, folder, evaluate=True, should_stop=stop_after(9))
    assert cut.step == 5
    forget(cut)
    with (folder / "train_metrics.csv").open("a") as file:
        file.write("6,1.")
    result = loop.run(params, folder, evaluate=True)
    rows = read(folder / "train_metrics.csv")
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    for name in ("loss", "accuracy", "gradient_norm", "learning_rate"):
        assert [row[name] for row in rows] == [
            r[name] for r in read(tmp_path / "whole/train_metrics.csv")
        ]
    evaluations = read(folder / "eval_metrics.csv")
    assert [row["step"] for row in evaluations] == ["2", "4", "6"]
    assert float(evaluations[-1]["accuracy"]) == result.metrics["accuracy"]


def test_a_table_has_one_row_per_step_and_columns_may_come_later(tmp_path: Path) -> None:
    table = Table(tmp_path / "t.csv")
    assert table.resume(0) == []
    table.append(1, {"loss": 0.5})
    table.append(2, {"loss": 0.25, "top5": 1.0})
    table.append(2, {"loss": 0.125})
    table.append(3, {"top5": float("nan")})
    assert (tmp_path / "t.csv").read_text() == "step,loss,top5\n1,0.5,\n2,0.125,\n3,,nan\n"
    with (tmp_path / "t.csv").open("a") as file:
        file.write("2,0.3")  # cut off while it was written
    again = Table(tmp_path / "t.csv")
    assert again.resume(2) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.125}]
    again.append(3, {"loss": 1e-30})
    assert (tmp_path / "t.csv").read_text() == "step,loss\n1,0.5\n2,0.125\n3,1e-30\n"


@pytest.mark.parametrize(
    "content", ["name,x\n1,2\n", "step,x\n1,two\n", "step,x\n1,2,3\n", "step,x\n,1\n"]
)
def test_a_file_of_others_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "train_metrics.csv"
    path.write_text(content)
    with pytest.raises(errors.HookError, match=r"is not a table of this run: .*Move it away"):
        Table(path).resume(9)
    assert path.read_text() == content


@pytest.mark.parametrize("name", ["", "..", "a/b.csv", "/tmp/x.csv"])
def test_files_lie_in_the_log_directory(name: str) -> None:
    with pytest.raises(errors.ParamsError, match="is not the name of a file in the log directory"):
        hooks.CSVLog.Params(train_file=name).instantiate()
