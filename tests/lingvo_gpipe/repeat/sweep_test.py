"""Grids of settings: what is read, what is refused before the first run, what is run and shown."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing import event_accumulator, plugin_event_multiplexer
from tensorboard.plugins.hparams import api_pb2, metadata

from lingvo_gpipe import errors, repeat
from lingvo_gpipe.repeat import sweep

# A stub trainer: its accuracy is the learning rate times ten, less its seed over a hundred.
TRAINER = """
import json, pathlib, sys
flags = [a.removeprefix("--").partition("=") for a in sys.argv[1:]]
named = {name: value for name, _, value in flags}
set_to = dict(value.split("=", 1) for name, _, value in flags if name == "params_override")
folder = pathlib.Path(named["logdir"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "set").write_text(json.dumps(set_to))
rate = float(set_to["train.optimizer.learning_rate"])
if rate > 1:
    sys.exit(1)
accuracy = 10 * rate - int(named["seed"]) / 100
(folder / "result.json").write_text(json.dumps({"metrics": {"accuracy": accuracy}}))
"""
RATE = "--sweep=train.optimizer.learning_rate"
MODEL = "--model=image.digits.MLP"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    """Return a function that runs a sweep with the stub trainer, and any settings."""
    (tmp_path / "trainer.py").write_text(TRAINER)

    def call(*own: str, check: Any = lambda *_: None) -> int:
        arguments = [*own, "--", MODEL, f"--logdir={tmp_path}/runs"]
        return repeat.run(arguments, [sys.executable, str(tmp_path / "trainer.py")], check)

    return call


def test_every_combination_is_run_and_has_a_line(
    run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    grid = (f"{RATE}=1e-2,3e-2", "--sweep=model.schedule=gpipe,'1f1b'", "--seeds=1,3")
    assert run(*grid) == 0
    found = {
        str(path.parent.relative_to(tmp_path / "runs")): json.loads(path.read_text())
        for path in (tmp_path / "runs").rglob("set")
    }
    assert len(found) == 8
    assert found["learning_rate=3e-2/schedule=_1f1b_/seed_3"] == {
        "train.optimizer.learning_rate": "3e-2",
        "model.schedule": "'1f1b'",
    }
    assert capfd.readouterr().out.endswith(
        textwrap.dedent("""\
        learning_rate  schedule  n         accuracy
        1e-2           gpipe     2  0.0800 ± 0.0141
        1e-2           '1f1b'    2  0.0800 ± 0.0141
        3e-2           gpipe     2  0.2800 ± 0.0141
        3e-2           '1f1b'    2  0.2800 ± 0.0141
        """)
    )
    assert run(*grid) == 0
    assert capfd.readouterr().out.count(" is done: ") == 8


def test_one_seed_is_enough_and_a_failed_run_does_not_end_the_others(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{RATE}=1e-2,3,3e-2") == 1
    found = capfd.readouterr()
    assert found.out.endswith(
        textwrap.dedent("""\
        learning_rate  n  accuracy
        1e-2           1    0.0900
        3              0         -
        3e-2           1    0.2900
        """)
    )
    assert found.err.splitlines() == [
        "TrainingError: learning_rate=3, seed 1 failed with exit code 1, for the reason above; "
        "1 of 3 are done. The same command goes on with it"
    ]


def test_the_hparams_page_shows_settings_states_and_metrics(
    run: Callable[..., int], tmp_path: Path
) -> None:
    assert run(f"{RATE}=1e-2,3e-2,3", "--seeds=1,2") == 1
    runs = tmp_path / "runs"
    multiplexer = plugin_event_multiplexer.EventMultiplexer(
        tensor_size_guidance=dict(event_accumulator.STORE_EVERYTHING_SIZE_GUIDANCE)
    )
    multiplexer.AddRunsFromDirectory(str(runs)).Reload()
    content = multiplexer.PluginRunToTagToContent(metadata.PLUGIN_NAME)
    assert content.keys() == {
        ".",
        *(f"learning_rate={rate}/seed_{seed}" for rate in ("1e-2", "3e-2") for seed in (1, 2)),
        *(f"learning_rate=3/seed_{seed}" for seed in (1, 2)),
    }
    experiment = metadata.parse_experiment_plugin_data(content["."][metadata.EXPERIMENT_TAG])
    assert [info.name for info in experiment.hparam_infos] == ["learning_rate", "seed"]
    rates = experiment.hparam_infos[0].domain_discrete
    assert [value.number_value for value in rates.values] == [1e-2, 3e-2, 3.0]
    (metric,) = experiment.metric_infos
    assert (metric.name.group, metric.name.tag) == ("eval", "accuracy")
    for name, status in (
        ("learning_rate=3e-2/seed_2", api_pb2.STATUS_SUCCESS),
        ("learning_rate=3/seed_1", api_pb2.STATUS_FAILURE),
    ):
        tags = content[name]
        start = metadata.parse_session_start_info_plugin_data(tags[metadata.SESSION_START_INFO_TAG])
        assert start.hparams["learning_rate"].number_value == float(
            name.partition("=")[2].partition("/")[0]
        )
        assert start.hparams["seed"].string_value == name[-1]
        assert start.group_name == name
        end = metadata.parse_session_end_info_plugin_data(tags[metadata.SESSION_END_INFO_TAG])
        assert end.status == status
        assert end.end_time_secs >= start.start_time_secs


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([f"{RATE}"], "is not a path and its values. Write --sweep=train.optimizer.learning_rate="),
        ([f"{RATE}="], "is not a path and its values. Write --sweep="),
        (["--sweep==1,2"], "--sweep==1,2 is not a path and its values. Write --sweep="),
        ([f"{RATE}=1,,2"], "is not a path and its values. Write --sweep="),
        ([f"{RATE}=1,1"], "learning_rate=1,1 has 1 twice. Give it once"),
        ([f"{RATE}=1", f"{RATE}=2"], "--sweep=train.optimizer.learning_rate comes twice. Give all"),
        (["--sweep=model.seed=1,2"], "--sweep=model.seed=1,2: seeds are not swept. Use --seeds"),
        (["--sweep=a='x y','x_y'"], "--sweep: two settings would have one folder, a=_x_y_. Write"),
    ],
)
def test_a_mistake_is_refused_before_the_first_run(
    run: Callable[..., int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    flags: Sequence[str],
    text: str,
) -> None:
    assert run(*flags) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("ParamsError: ")
    assert text in line
    assert not (tmp_path / "runs").exists()


def test_a_refused_setting_begins_no_run(
    run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(arguments: Sequence[str], wanted: Sequence[sweep.Setting]) -> None:
        assert list(arguments) == [MODEL, f"--logdir={tmp_path}/runs"]
        raise errors.ParamsError(str(len(wanted)))

    assert run(f"{RATE}=1,2", "--sweep=model.num_partitions=1,2", check=refuse) == 1
    assert capfd.readouterr().err == "ParamsError: 4\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("texts", "refused"),
    [
        (["train.accumulate=1,2", "train.optimizer.name=SGD,'Adam'"], None),
        (["train.optimizer.learning_rate=optim.InverseSquareRoot,optim.RateRange"], None),
        (
            ["train.accumulate=1e-3,1", "train.optimizer.learning_rate=1e-3,3e-3"],
            "'train.accumulate' must be int, got 0.001 (float). Try --sweep=train.accumulate=1, as",
        ),
        (
            ["train.accumulate=1,2", "train.optimizer.learning_rate=1e-3,3e-3"],
            "Try --sweep=train.optimizer.learning_rate.config.initial_learning_rate=1e-3,3e-3",
        ),
        (["train.acumulate=1"], "has no field 'train.acumulate'; nearest 'train.accumulate'"),
        (["train.accumulate=1,x"], "'train.accumulate' must be int, got x. Try --sweep="),
        (["train.accumulate=1,0"], "train.accumulate=0 is too small. Use 1 or more"),
        (["eval.best=None", "eval.patience=3"], "eval.patience=3 needs a metric to watch. Set"),
    ],
)
def test_settings_that_a_model_does_not_have_are_refused(
    texts: Sequence[str], refused: str | None
) -> None:
    wanted = sweep.settings(sweep.axes(texts))
    if refused is None:
        sweep.check([MODEL], wanted)
        return
    with pytest.raises(errors.ParamsError) as caught:
        sweep.check([MODEL], wanted)
    assert refused in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(errors.ParamsError, match=r"no model 'image\.digits\.MPL'; nearest "):
        sweep.check(["--model=image.digits.MPL"], [sweep.Setting()])


def test_values_may_have_commas_and_names_are_as_short_as_they_can_be() -> None:
    texts = ["model.cuts=(1, 2),(2, 3)", "a.b.rate='x,y',3", "a.c.rate={'k': [1, 2]}"]
    found = sweep.axes(texts)
    assert [len(axis.values) for axis in found] == [2, 2, 1]
    last = sweep.settings(found)[-1]
    assert last.values == ("(2, 3)", "3", "{'k': [1, 2]}")
    assert last.names == ("model.cuts", "b.rate", "c.rate")
    assert last.folders == ("model.cuts=_2_3_", "b.rate=3", "c.rate=_k_1_2_")
    assert last.overrides[1] == "a.b.rate=3"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-2", -2.0),
        ("SGD", "SGD"),
        ("True", "True"),
        ("1e999", "1e999"),
        ("(", "("),
    ],
)
def test_numbers_are_shown_as_numbers(text: str, value: float | str) -> None:
    assert sweep.number(text) == value
