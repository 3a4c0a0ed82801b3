"""Layers and trees that the tests of Params share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import keras
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.hyperparams import Configurable, field, required

hyperparams.register_package(__name__)


class Layer(tf.Module, Configurable):
    class Params(Configurable.Params):
        name: str = field("layer", "Name.")

    def __init__(self, params: Layer.Params, *args: Any, **kwargs: Any) -> None:
        tf.Module.__init__(self, name=params.name)
        self.params = params
        self.rest = (args, kwargs)


class Dense(Layer):
    class Params(Layer.Params):
        units: int = required("Output features.")
        rate: float = field(0.5, "Share that is dropped.")
        use_bias: bool = field(True, "Adds a bias.")


class Wide(Dense):
    """Declares no Params."""


class Other(Layer):
    class Params(Layer.Params):
        name = "other"
        choice: Literal["gpipe", "1f1b"] = field("gpipe", "A schedule.")


class Stack(Layer):
    class Params(Layer.Params):
        layers: list[Layer.Params] = field([], "Layers.")
        head: Dense.Params | None = field(None, "Head.")
        tie: dict[str, str] = field({}, "Ties.")


class Section(hyperparams.Params):
    """A section of a tree that belongs to no class."""

    model: Stack.Params = field(Stack.Params(layers=[Dense.Params(units=1)]), "Model.")
    num_micro_batches: int = field(1, "M.")


class Everything(Configurable):
    class Params(Configurable.Params):
        number: int = field(3, "An int.")
        real: float = field(1.0, "A float.")
        flag: bool = field(False, "A bool.")
        word: str = field("a", "A string.")
        maybe: int | None = field(None, "An int or None.")
        either: str | int | None = field(None, "A string, an int or None.")
        literal: Literal["gpipe", 2, None] = field("gpipe", "A choice.")
        pair: tuple[int, float] = field((1, 2.0), "Two numbers.")
        many: tuple[int, ...] = field((), "Numbers.")
        words: list[str] = field([], "Strings.")
        table: dict[str, list[int]] = field({}, "Lists by name.")
        kind: type[Layer] = field(Dense, "A layer class.")
        keras_layer: type[keras.layers.Layer] | None = field(None, "A Keras class.")
        function: Callable[[Any], Any] | None = field(None, "A function.")
        child: Layer.Params = field(Other.Params(), "A layer.")
        children: dict[str, Layer.Params] = field({}, "Layers by name.")
        pairs: tuple[tuple[Dense.Params, int], ...] = field((), "Layers and numbers.")
        anything: Any = field(None, "Anything that a text can hold.")


def double(x: int) -> int:
    """A function at the top level of a module."""
    return 2 * x


def here(name: str) -> str:
    """Return the qualified name of a class of this file."""
    return f"{__name__}.{name}"


def message(action: Callable[[], object]) -> str:
    """Return the text of the ParamsError that `action` raises."""
    with pytest.raises(errors.ParamsError) as caught:
        action()
    return str(caught.value)


def tree() -> Section:
    """Return a tree with lists, a dict and required fields that are set."""
    layers = [Dense.Params(units=2), Other.Params(), Dense.Params(units=4)]
    return Section(model=Stack.Params(layers=layers, tie={"a": "b"}))


def everything() -> Everything.Params:
    """Return a tree with a value of every kind."""
    return Everything.Params(
        number=-(10**30),
        real=float("-inf"),
        word="quote ' \" \\ \n\t\x00 \u2028 é 😀 \udc80 REQUIRED # :",
        maybe=0,
        either="None",
        literal=None,
        pair=(1, -0.0),
        many=(3,),
        words=["", "a"],
        table={"a: b": [1], "": [], "class": [2], "é": []},
        kind=Wide,
        keras_layer=keras.layers.Dense,
        function=keras.activations.relu,
        child=Dense.Params(),
        children={"a.b": Dense.Params(units=1), "plain": Stack.Params(layers=[Other.Params()])},
        pairs=((Dense.Params(units=1), 2),),
        anything=[
            None,
            True,
            1,
            float("nan"),
            "x",
            (1,),
            {"k": Wide},
            Dense.Params,
        ],
    )
