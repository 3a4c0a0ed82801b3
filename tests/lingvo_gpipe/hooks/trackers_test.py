"""Hooks for MLflow and Weights & Biases, with stubs and, where they are installed, the packages.

The stubs have the calls that the hooks make. What is read back from MLflow is read through the
same calls, from the stub and from the package alike.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from lingvo_gpipe import errors, hooks
from lingvo_gpipe.run import loop
from tests.support.saved import forget
from tests.tiny_task import one_layer_task, stop_after


class StubMLflow(types.ModuleType):
    """The part of `mlflow` that the hook calls; its runs are in a dict."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.experiments: dict[str, types.SimpleNamespace] = {}
        self.runs: dict[str, Any] = {}
        self.texts: dict[tuple[str, str], str] = {}
        self.entities = types.SimpleNamespace(Metric=self._metric, Param=self._param)

    def _metric(self, key: str, value: float, timestamp: int, step: int) -> Any:
        assert isinstance(value, float)
        return types.SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step)

    def _param(self, key: str, value: str) -> Any:
        assert isinstance(value, str)
        assert not set("[]'\"") & set(key)
        return types.SimpleNamespace(key=key, value=value)

    def MlflowClient(self, tracking_uri: str | None) -> StubMLflow:  # noqa: N802 (its name there)
        assert tracking_uri is None or tracking_uri.startswith("sqlite:///")
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return self.experiments.get(name)

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = types.SimpleNamespace(experiment_id=str(len(self.experiments)))
        return str(self.experiments[name].experiment_id)

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        identity = f"run{len(self.runs)}"
        self.runs[identity] = types.SimpleNamespace(
            info=types.SimpleNamespace(
                run_id=identity, run_name=run_name, status="RUNNING", experiment_id=experiment_id
            ),
            data=types.SimpleNamespace(params={}),
            metrics=[],
        )
        return self.runs[identity]

    def get_run(self, run_id: str) -> Any:
        return self.runs[run_id]

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id].info.status = status

    set_terminated = update_run

    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
        self.texts[run_id, artifact_file] = text

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(params) <= 100
        self.runs[run_id].metrics += metrics
        self.runs[run_id].data.params.update({param.key: param.value for param in params})

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        return [metric for metric in self.runs[run_id].metrics if metric.key == key]


class StubWandb(types.ModuleType):
    """The part of `wandb` that the hook calls; what it receives is in lists."""

    Settings = types.SimpleNamespace

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.exit_codes: list[int] = []

    def init(self, **options: Any) -> Any:
        self.begun.append(options)
        return types.SimpleNamespace(
            id=options["id"] or "made",
            log=lambda metrics, step: self.logged.append((step, metrics)),
            finish=lambda exit_code: self.exit_codes.append(exit_code),
        )


@pytest.fixture(params=["stub", "package"])
def mlflow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stub of MLflow or, where it is installed, the package."""
    if request.param == "stub":
        stub = StubMLflow()
        monkeypatch.setitem(sys.modules, "mlflow", stub)
        return stub
    return pytest.importorskip(
        "mlflow",
        minversion="3",
        reason="needs an extra, beside the stub that is always tested: pip install 'mlflow>=3,<4'",
        exc_type=ImportError,
    )


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StubWandb:
    stub = StubWandb()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    return stub


def hooked(hook: hooks.Hook.Params) -> Any:
    params = one_layer_task(max_steps=6, save_interval_steps=2)
    params.train.hooks = (hook,)
    return params


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_metrics_settings_and_state_of_a_resumed_run(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(tracking_uri=uri)
    params = hooked(hooks.MLflowLog.Params(tracking_uri=uri, experiment="points"))
    cut = loop.run(params, tmp_path / "mine", evaluate=True, should_stop=stop_after(9))
    assert cut.step == 5
    forget(cut)
    identity = (tmp_path / "mine" / "mlflow_run_id").read_text().strip()
    assert client.get_run(identity).info.status == "KILLED"
    result = loop.run(params, tmp_path / "mine", evaluate=True)
    run = client.get_run(identity)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    assert run.info.experiment_id == client.get_experiment_by_name("points").experiment_id
    assert run.data.params["train.optimizer.name"] == "SGD"
    assert run.data.params["train.hooks.0.experiment"] == "points"
    losses = client.get_metric_history(identity, "train/loss")
    assert [metric.step for metric in losses] == [1, 2, 3, 4, 5, 6]
    accuracies = client.get_metric_history(identity, "eval/accuracy")
    assert [metric.step for metric in accuracies] == [2, 4, 6]
    assert accuracies[-1].value == result.metrics["accuracy"]
    (tmp_path / "mine" / "mlflow_run_id").unlink()
    params.train.max_steps = 7
    params.train.optimizer.learning_rate = 3e38
    with pytest.raises(errors.TrainingError):
        loop.run(params.set_path("train.max_steps", 9), tmp_path / "mine")
    other = (tmp_path / "mine" / "mlflow_run_id").read_text().strip()
    assert other != identity
    assert client.get_run(other).info.status == "FAILED"


def test_wandb_receives_metrics_and_settings_of_a_resumed_run(
    tmp_path: Path, wandb: StubWandb
) -> None:
    params = hooked(hooks.WandbLog.Params(project="points", mode="offline"))
    loop.run(params, tmp_path / "mine", evaluate=True, should_stop=stop_after(6))
    result = loop.run(params, tmp_path / "mine", evaluate=True)
    assert [begun["id"] for begun in wandb.begun] == [None, "made"]
    first = wandb.begun[0]
    assert (first["project"], first["name"], first["mode"]) == ("points", "mine", "offline")
    assert first["dir"] == str(tmp_path / "mine")
    assert first["config"]["train.optimizer.name"] == "SGD"
    trained = [step for step, metrics in wandb.logged if "train/loss" in metrics]
    assert trained == [1, 2, 3, 4, 5, 6]
    assert wandb.logged[-1] == (6, {f"eval/{name}": v for name, v in result.metrics.items()})
    assert wandb.exit_codes == [0, 0]
    params.train.set(max_steps=9)
    params.train.optimizer.learning_rate = 3e38
    with pytest.raises(errors.TrainingError):
        loop.run(params, tmp_path / "mine")
    assert wandb.exit_codes[-1] == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None,
    reason="needs an extra, beside the stub that is always tested: pip install 'wandb>=0.20,<1'",
)
def test_the_package_wandb_keeps_metrics_offline(tmp_path: Path) -> None:
    result = loop.run(hooked(hooks.WandbLog.Params(mode="offline")), tmp_path, evaluate=True)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    # The format is a log of protocol buffers, in which the values are JSON.
    content = path.read_bytes()
    assert content.count(b"eval/accuracy") >= 3
    assert str(result.metrics["loss"]).encode() in content


@pytest.mark.parametrize(
    ("name", "hook"), [("mlflow", hooks.MLflowLog.Params()), ("wandb", hooks.WandbLog.Params())]
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hook: hooks.Hook.Params
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    for run in (loop.run, loop.dry_run):
        with pytest.raises(errors.HookError) as caught:
            run(hooked(hook), tmp_path)
        assert str(caught.value) == (
            f"hook {hook.class_name()} (train.hooks[0]) cannot be made: the package {name} cannot "
            f"be imported (import of {name} halted; None in sys.modules). Install it: pip install "
            f"'lingvo-gpipe[{name}]'"
        )
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("params", "variables", "expected"),
    [
        (hooks.WandbLog.Params(), {}, True),
        (hooks.WandbLog.Params(mode="offline"), {}, False),
        (hooks.WandbLog.Params(), {"WANDB_MODE": "offline"}, False),
        (hooks.WandbLog.Params(mode="online"), {"WANDB_MODE": "offline"}, True),
        (hooks.MLflowLog.Params(), {}, False),
        (hooks.MLflowLog.Params(tracking_uri="sqlite:///runs.db"), {}, False),
        (hooks.MLflowLog.Params(tracking_uri="runs/mlflow"), {}, False),
        (hooks.MLflowLog.Params(tracking_uri="http://10.0.0.1:5000"), {}, True),
        (hooks.MLflowLog.Params(tracking_uri="postgresql://db/mlflow"), {}, True),
        (hooks.MLflowLog.Params(tracking_uri="databricks"), {}, True),
        (hooks.MLflowLog.Params(), {"MLFLOW_TRACKING_URI": "https://flow.example"}, True),
    ],
)
def test_which_trackers_reach_other_hosts(
    params: Any, variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    assert params.instantiate().needs_network is expected
