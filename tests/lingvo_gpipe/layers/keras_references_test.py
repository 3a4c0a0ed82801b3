"""A configuration of a Keras object runs no code that it names, wherever in it."""

from __future__ import annotations

import copy
from typing import Any

import keras
import pytest
from keras import layers
from keras.src.saving import serialization_lib
from keras.src.utils import python_utils

from lingvo_gpipe import errors, hyperparams, optim
from lingvo_gpipe import layers as own_layers
from lingvo_gpipe.keras_layers import adapter
from lingvo_gpipe.layers import base, keras_references
from tests.lingvo_gpipe.keras_layers import keras_runs

hyperparams.register_package(__name__)

CALLED: list[str] = []
X = keras_runs.spec(2, 3, 4)


@keras.saving.register_keras_serializable(package="hostile")
def fires(*args: Any, **kwargs: Any) -> Any:
    del kwargs
    CALLED.append("function")
    return args[0] if args else None


@keras.saving.register_keras_serializable(package="hostile")
class Fires:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        CALLED.append("class")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**config)

    def get_config(self) -> dict[str, Any]:
        return {}


class Runs(layers.Lambda):
    pass


def function(module: str | None, name: str, registered: str | None = "function") -> dict[str, Any]:
    return {
        "module": module,
        "class_name": "function",
        "config": name,
        "registered_name": registered,
    }


def lambda_layer(called: Any, **more: Any) -> dict[str, Any]:
    config = {"name": "hidden", "function": called, **more}
    return {"module": "keras.layers", "class_name": "Lambda", "config": config}


def _marshalled() -> dict[str, Any]:
    code, defaults, closure = python_utils.func_dump(lambda x: fires(x))
    return {"code": code, "defaults": defaults, "closure": closure}


UNSAFE = function("keras.config", "enable_unsafe_deserialization")
CODE = _marshalled()
LAMBDA = {"class_name": "__lambda__", "config": CODE}
HOSTILE: list[Any] = [
    UNSAFE,
    {"module": "keras.config", "class_name": "enable_unsafe_deserialization", "config": {}},
    function("keras.src.saving.serialization_lib", "enable_unsafe_deserialization"),
    function("builtins", "eval"),
    function("os", "system"),
    function("keras.ops", "map"),
    function("keras.activations", "deserialize"),
    function(__name__, "fires"),
    function(None, "hostile>fires", "hostile>fires"),
    function("keras.activations", "relu", "hostile>fires"),
    {"class_name": "function", "config": UNSAFE, "module": "builtins"},
    {"class_name": "__lambda__", "config": {"value": CODE["code"]}},
    LAMBDA,
    "hostile>fires",
    "hostile>Fires",
    {"class_name": "Fires", "module": __name__, "config": {}, "registered_name": "hostile>Fires"},
    {"class_name": "Fires", "module": None, "config": {}, "registered_name": "hostile>Fires"},
    {
        "class_name": "Dense",
        "module": "keras.layers",
        "config": {"units": 2},
        "registered_name": "hostile>Fires",
    },
    {"reference": Fires, "config": {}},
    {"reference": Runs, "config": {"function": "relu"}},
    {"reference": layers.Lambda, "config": {"function": LAMBDA}},
    Fires,
    layers.Lambda,
    fires,
    keras.config.enable_unsafe_deserialization,
    lambda_layer(LAMBDA),
    lambda_layer("relu"),
    lambda_layer(function("keras.activations", "relu")),
    lambda_layer(keras.activations.relu, arguments={"inner": UNSAFE}),
    lambda_layer(fires),
    {"class_name": "Lambda", "config": {"function": LAMBDA}},
    {"class_name": "TFSMLayer", "module": "keras.layers", "config": {"filepath": "x"}},
    {"class_name": "get_file", "module": "keras.utils", "config": {"origin": "x"}},
    {
        "class_name": "__typespec__",
        "spec_name": "Fires",
        "module": __name__,
        "registered_name": "hostile>Fires",
        "config": [],
    },
    {"class_name": "Adam", "module": "keras.optimizers", "config": {}},
]


def check_nothing_ran() -> None:
    assert CALLED == []
    assert serialization_lib.in_safe_mode() is None


def plain(value: Any) -> Any:
    """Return a configuration as lists and dicts that can be changed."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_what_runs_code_is_refused_anywhere_in_a_layer_s_configuration(hostile: Any) -> None:
    model = keras.Sequential([layers.Dense(2, kernel_regularizer="l2"), layers.ReLU()])
    params = adapter.from_keras(model, name="mine")
    given = params.config
    config = plain(given if isinstance(given, dict) else given.plain())
    assert adapter.KerasLayer.Params.from_text(params.to_text()).fprop_meta(X).outputs is not None
    dense = config["config"]["layers"][0]["config"]
    assert "units" in dense
    for holder, key in ((config, "arguments"), (dense, "kernel_regularizer"), (dense, "new")):
        before = dict(holder)
        holder[key] = copy.deepcopy(hostile)
        params.set(config=config)
        with pytest.raises(errors.LayerError) as caught:
            params.fprop_meta(X)
        assert "\n" not in str(caught.value)
        with pytest.raises(errors.UserError):
            adapter.KerasLayer.Params.from_text(params.to_text()).fprop_meta(X)
        holder.clear()
        holder.update(before)
    check_nothing_ran()


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_what_runs_code_is_refused_wherever_a_keras_object_is_made(hostile: Any) -> None:
    assert "but a configuration names only Keras" in str(keras_references.refusal([hostile]))
    config = {"units": hostile}
    with pytest.raises(errors.ParamsError, match=r"no Keras .*, since it names"):
        optim.KerasRule.Params(name="SGD", config=config).instantiate()
    with pytest.raises(errors.ParamsError, match=r"no Keras .*, since it names"):
        optim.KerasLearningRate.Params(name="CosineDecay", config=config).instantiate()
    metric = own_layers.KerasMetric.Params(metric="MeanMetricWrapper", config={"fn": hostile})
    with pytest.raises(errors.LayerError, match=r"no Keras .*, since it names"):
        metric.fprop_meta(X, X)
    with pytest.raises(errors.LayerError, match=r"no Keras .*, since it names"):
        base.initializer("Constant", value=hostile)
    check_nothing_ran()


def test_a_registered_name_makes_no_metric_initializer_or_activation() -> None:
    for name in ("hostile>fires", "hostile>Fires"):
        metric = own_layers.KerasMetric.Params(metric=name)
        with pytest.raises(errors.LayerError, match=r"no Keras metric .* names the registered"):
            metric.fprop_meta(X, X)
        with pytest.raises(
            errors.LayerError, match=r"no Keras initializer .* names the registered"
        ):
            base.initializer(name)
        with pytest.raises(errors.LayerError, match="no activation"):
            own_layers.Activation.Params(activation=name).fprop_meta(X)
    check_nothing_ran()


def test_a_text_names_no_function_of_keras_but_activations() -> None:
    params = own_layers.Dense.Params(units=1)
    params.override("kernel_init_args={'value': keras.activations.relu}")
    with pytest.raises(errors.ParamsError, match="is not a class or function of a registered"):
        params.override("kernel_init_args={'value': keras.utils.get_file}")
    with pytest.raises(errors.ParamsError, match="has no name that a text could hold"):
        params.set(kernel_init_args={"value": keras.utils.get_file}).to_text()


def test_a_function_from_python_is_copied_once_and_does_the_same() -> None:
    def scaled(x: Any, factor: float = 2.0, *, shift: float = 1.0) -> Any:
        return x * factor + shift

    kept = keras_references.from_python(scaled)
    assert kept is not scaled
    assert keras_references.from_python(scaled) is kept
    assert keras_references.from_python(kept) is kept
    assert kept(3.0) == scaled(3.0)
    assert keras_references.refusal({"function": kept}) is None
    assert keras_references.refusal({"function": scaled}) is not None
