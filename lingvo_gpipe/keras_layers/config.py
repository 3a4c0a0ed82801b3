"""Keras objects as data: how Params store them, and how they are made from that again.

Classes of Keras are stored as Keras serialises them. Other classes are stored as references: a text
writes their name, and only names in registered packages are read. A class without a name (defined
in a function) and a function other than an activation of Keras work until a text is written:
`keras_references` says what a text may name.
"""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import keras

from lingvo_gpipe import errors, precision
from lingvo_gpipe.hyperparams import references
from lingvo_gpipe.layers import keras_references

_REFERENCE = keras_references.REFERENCE
_NOT_KEPT = ("build_config", "compile_config")


def to_config(live: keras.Operation) -> dict[str, Any]:
    """Return a Keras layer or operation as the value of a Params field.

    Raises:
        LayerError: it has no get_config.
    """
    try:
        settings = live.get_config()
    except NotImplementedError as error:
        raise errors.LayerError(
            f"{live.name} ({type(live).__name__}) has no get_config, so it cannot be made again "
            "for a pipeline. Define its get_config"
        ) from error
    if isinstance(live, keras.layers.Normalization) and live.input_mean is None and live.built:
        settings |= {
            "mean": _statistic(live, live.mean),
            "variance": _statistic(live, live.variance),
        }
    kept: dict[str, Any] = _kept({"config": settings, **_named(type(live))}, live)
    return kept


def _statistic(live: keras.layers.Normalization, value: Any) -> Any:
    """Return what a built layer has adapted to, or 0 or 1, which its config does not hold."""
    array = keras.ops.convert_to_numpy(value)  # as broadcast to the inputs
    return array.reshape([array.shape[axis] for axis in live.axis]).tolist()


def from_config(config: dict[str, Any], policy: precision.Policy) -> keras.Operation:
    """Make the Keras layer or operation that `to_config` described.

    Args:
        config: result of `to_config`.
        policy: replaces the layer's dtype policy, also in sublayers with the same policy.

    Raises:
        LayerError: the configuration does not describe a Keras layer or operation, or it names
            what would run other code.
    """
    refuse_code(config, class_name(config))
    named: dict[str, Any] = {}
    renamed = {_policy_name(config): policy.name}
    plain = _plain(config, renamed, named)
    try:
        with keras.saving.custom_object_scope(named):
            made = keras.saving.deserialize_keras_object(plain, safe_mode=True)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise errors.LayerError(
            f"no Keras layer can be made from this {class_name(config)}: {first_line(error)}"
        ) from error
    if not isinstance(made, keras.Operation):
        raise errors.LayerError(
            f"{class_name(config)} is not a Keras layer or operation. "
            "Make the configuration by keras_layers.from_keras"
        )
    return made


def refuse_code(value: Any, where: str) -> None:
    """Refuse a configuration, or an argument of a call, that names what would run code.

    Raises:
        LayerError: naming the class or function.
    """
    keras_references.check(value, f"{where}: no Keras layer")


def from_constant(value: Any) -> Any:
    """Return a constant argument of a call (slice, Ellipsis, array, dtype) as Params store it."""
    return _kept(value)


def to_constant(value: dict[str, Any]) -> Any:
    """Return the constant that `from_constant` described."""
    return keras.saving.deserialize_keras_object(_plain(value, {}, {}), safe_mode=True)


def class_name(config: dict[str, Any]) -> str:
    """Return the name of the class that a configuration describes."""
    kind = config.get(_REFERENCE)
    return kind.__name__ if isinstance(kind, type) else str(config.get("class_name"))


def without_names(value: Any) -> Any:
    """Return a configuration without names, in which layers of one structure differ."""
    if isinstance(value, dict):
        if value.get("class_name") == "DTypePolicy":
            return value
        return {k: without_names(v) for k, v in value.items() if k not in ("name", "build_config")}
    return [without_names(item) for item in value] if isinstance(value, list | tuple) else value


def first_line(error: Exception) -> str:
    """Return the first line of the original error, before Keras wrapped it."""
    cause: BaseException = error
    while cause.__context__ is not None:
        cause = cause.__context__
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]


def policy_name(live: keras.Operation) -> str | None:
    """Return the dtype policy of a live layer; None: Keras' default, float32."""
    policy = getattr(live, "dtype_policy", None)
    if policy is None or policy.name not in precision.POLICIES:
        return None
    return None if policy.name == "float32" == keras.config.dtype_policy().name else policy.name


def automatic_stem(live: keras.Operation) -> str | None:
    """Return `dense` for a layer that Keras named `dense_3`; None if the user named it.

    Keras numbers such names over the whole process, so they differ in another process.

    >>> automatic_stem(keras.layers.Dense(4)), automatic_stem(keras.layers.Dense(4, name="ffn"))
    ('dense', None)
    """
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", type(live).__name__.replace("_", ""))
    stem = re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()
    return stem if re.fullmatch(rf"{re.escape(stem)}(_\d+)?", live.name) else None


def _policy_name(config: dict[str, Any]) -> str | None:
    policy = config["config"].get("dtype") if isinstance(config.get("config"), dict) else None
    if not isinstance(policy, dict) or policy.get("class_name") != "DTypePolicy":
        return None
    name = str(policy["config"]["name"])
    return name if name in precision.POLICIES else None


def _named(kind: type) -> dict[str, Any]:
    """Return the marker of an object of class `kind`."""
    if not kind.__module__.startswith("keras."):
        return {_REFERENCE: kind}
    module, _, name = references.public_name(kind).rpartition(".")
    return {"module": module, "class_name": name}


def _kept(value: Any, live: Any = None) -> Any:
    """Return a part of a configuration as Params store it; `live` is the object it describes."""
    if isinstance(live, types.FunctionType) and _is_function(value):
        return keras_references.from_python(live)
    if isinstance(value, types.FunctionType):
        return keras_references.from_python(value)
    if isinstance(value, dict):
        return _kept_dict(value, live)
    if isinstance(value, list | tuple):
        lives = live if isinstance(live, list | tuple) and len(live) == len(value) else ()
        items = [_kept(v, lives[n] if lives else None) for n, v in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, bool | int | float | str | type) or value is None:
        return value
    return _kept(keras.saving.serialize_keras_object(value), value)


def _kept_dict(value: dict[str, Any], live: object) -> dict[str, Any]:
    if _REFERENCE in value or ("class_name" in value and "config" in value):
        settings = value["config"]
        inner = (
            {k: _kept(v, getattr(live, k, None)) for k, v in settings.items()}
            if isinstance(settings, dict)
            else _kept(settings)
        )
        marks = {k: v for k, v in value.items() if k not in ("config", *_NOT_KEPT)}
        foreign = _foreign(value, live)
        if foreign is not None:
            marks = {_REFERENCE: foreign}
        return {**marks, "config": inner}
    return {str(k): _kept(v) for k, v in value.items()}


def _is_function(value: object) -> bool:
    return isinstance(value, dict) and value.get("class_name") in ("function", "__lambda__")


def _foreign(value: dict[str, Any], live: object) -> type | None:
    """Return the class of a serialised object; None if it belongs to Keras, or is a function."""
    name = value.get("class_name")
    if "module" not in value or name is None:
        return None
    module = value["module"] or "__main__"
    if module == "keras" or module.startswith("keras.") or module == "builtins":
        return None
    if live is not None and type(live).__name__ == name:
        return type(live)
    defined = vars(sys.modules.get(module, types)).get(name)
    if not isinstance(defined, type):
        raise errors.LayerError(
            f"{module}.{name}, part of a Keras layer, cannot be found by its name. Define it at "
            "the top level of its module"
        )
    return defined


def _plain(value: Any, renamed: dict[str | None, str], references: dict[str, Any]) -> Any:
    """Return a configuration as Keras reads it; add the names that it uses to `references`."""
    if isinstance(value, types.FunctionType):
        token = _token(value, references)
        return {"module": None, "class_name": "function", "config": token, "registered_name": token}
    if isinstance(value, list | tuple):
        items = [_plain(item, renamed, references) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if not isinstance(value, dict):
        return value
    made = {key: _plain(v, renamed, references) for key, v in value.items() if key != _REFERENCE}
    if isinstance(value.get(_REFERENCE), type):
        token = _token(value[_REFERENCE], references)
        made |= {"module": None, "class_name": token, "registered_name": token}
    elif value.get("class_name") == "DTypePolicy":
        name = made["config"]["name"]
        made["config"] = {**made["config"], "name": renamed.get(name, name)}
    elif value.get("class_name") == "InputLayer":
        dtype = made["config"].get("dtype")
        compute = precision.POLICIES[renamed[dtype]].compute.name if dtype in renamed else dtype
        made["config"] = {**made["config"], "dtype": compute}
    return made


def _token(referenced: type | types.FunctionType, references: dict[str, Any]) -> str:
    for token, known in references.items():
        if known is referenced:
            return token
    token = f"lingvo_gpipe>{referenced.__name__}_{len(references)}"
    references[token] = referenced
    return token
