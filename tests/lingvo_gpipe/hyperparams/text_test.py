"""Params as text, and set by text: what round-trips, what is refused."""

from __future__ import annotations

from typing import Any, Literal

import keras
import pytest

from lingvo_gpipe import callbacks, hyperparams, optim, task
from lingvo_gpipe.hyperparams import field, from_text
from lingvo_gpipe.hyperparams import text as texts
from tests.lingvo_gpipe.hyperparams import cases
from tests.lingvo_gpipe.hyperparams.cases import (
    Dense,
    Everything,
    Layer,
    Other,
    Wide,
    double,
    everything,
    here,
    message,
    tree,
)

# --- Text ---


def test_to_text_is_a_line_per_field() -> None:
    assert tree().to_text() == "\n".join(
        [
            f"class: {here('Section')}",
            f"model.class: {here('Stack')}",
            "model.name: 'layer'",
            "model.layers.class: list",
            f"model.layers[0].class: {here('Dense')}",
            "model.layers[0].name: 'layer'",
            "model.layers[0].units: 2",
            "model.layers[0].rate: 0.5",
            "model.layers[0].use_bias: True",
            f"model.layers[1].class: {here('Other')}",
            "model.layers[1].name: 'other'",
            "model.layers[1].choice: 'gpipe'",
            f"model.layers[2].class: {here('Dense')}",
            "model.layers[2].name: 'layer'",
            "model.layers[2].units: 4",
            "model.layers[2].rate: 0.5",
            "model.layers[2].use_bias: True",
            "model.head: None",
            "model.tie: {'a': 'b'}",
            "num_micro_batches: 1",
            "",
        ]
    )


def test_texts_name_keras_classes_publicly() -> None:
    text = everything().to_text()
    assert from_text(text) == everything()
    lines = text.splitlines()
    assert "keras_layer: keras.layers.Dense" in lines
    assert "function: keras.activations.relu" in lines


def test_from_text_of_a_class_refuses_another() -> None:
    assert Dense.Params.from_text(Wide.Params(units=1).to_text()) == Wide.Params(units=1)
    assert message(lambda: Dense.Params.from_text(Other.Params().to_text())) == (
        f"the text is of {here('Other')}, not {here('Dense')}"
    )


def test_a_field_without_a_line_keeps_its_default() -> None:
    text = f"# An older text.\n\nclass: {here('Dense')}\r\nunits: 3\n"
    assert from_text(text) == Dense.Params(units=3)


# Text → how the error begins; {here} is this module.
WRONG = {
    "": "the text is empty; it begins with 'class: name'",
    "units: 3": "line 1: a text begins with 'class: name', not 'units: 3'",
    "class: os.system": "line 1: 'os.system' is not in a registered package (",
    "class: keras.layers.Dense": "line 1: 'keras.layers.Dense' is not a class with Params",
    "class: {here}Nobody": "line 1: '{here}Nobody' is not a class or function of a registered",
    "class: {here}Dense\nunits 3": "line 2: 'units 3' is not of the form 'dotted.path: value'",
    "class: {here}Dense\nunits: 3\nunits: 4": "line 3: a second line of 'units'",
    "class: {here}Dense\nclass: {here}Dense": "line 2: a second line of ''",
    "class: {here}Dense\nunits: 3\nunits.x: 4": (
        "line 3: 'units.x' comes before a line '... .class: name' of what holds it"
    ),
    "class: {here}Stack\nhead.units: 4": "line 2: 'head.units' comes before a line",
    "class: {here}Dense\nname: 'x'\nunit: 3": (
        "line 3: {here}Dense has no field 'unit'; nearest 'units'"
    ),
    "class: {here}Dense\n\nunits: 'x'": "line 3: {here}Dense: 'units' must be int, got 'x' (str)",
    "class: {here}Stack\nlayers.class: list\nlayers[1].class: {here}Dense": (
        "line 2: the elements below are not those of a list"
    ),
    "class: {here}Stack\nhead.class: {here}Other": (
        "line 2: {here}Stack: 'head' must be Dense.Params or None, got Other() (Params)"
    ),
    "class: {here}Stack\nhead.class: {here}Dense\nhead.units: x(3)": (
        "line 3: cannot read 'x(3)' as a literal"
    ),
    "class: {here}Dense\nrate: REQUIRED": "line 2: {here}Dense: 'rate' must be float, got REQUIRED",
}


@pytest.mark.parametrize("lines", WRONG)
def test_a_wrong_text_names_its_line(lines: str) -> None:
    text = message(lambda: from_text(lines.replace("{here}", here(""))))
    assert text.startswith(WRONG[lines].replace("{here}", here("")))


def test_values_without_a_name_have_no_text() -> None:
    class Local(Layer):
        pass

    name = here("Everything")
    where = "test_values_without_a_name_have_no_text.<locals>"
    changes: list[tuple[dict[str, Any], str, str]] = [
        ({"kind": Local}, "kind", f"{Local!r}"),
        ({"anything": [{"a": Local}]}, "anything", f"{Local!r}"),
        ({"children": {"a": Local.Params()}}, "children.a", f"{Local!r}"),
    ]
    for change, path, local in changes:
        text = message(Everything.Params().set(change).to_text)
        assert where in local
        assert text.startswith(f"{name}: '{path}': {local[:40]}")
        assert "has no name that a text could hold; define it at the top of a module" in text
    assert "has no name" in message(Everything.Params(function=lambda x: x).to_text)


def test_fields_are_listed_with_value_type_and_help() -> None:
    lines = texts.listed(tree(), "*")
    fields = [path for path, _, _ in tree().iter_paths()]
    assert [line.split(" = ")[0] for line in lines if not line.startswith("    ")] == fields
    assert texts.listed(tree(), "num_*") == ["num_micro_batches = 1 (int)", "    M."]
    assert texts.listed(tree(), "model.layers[*].units")[2] == "model.layers[2].units = 4 (int)"
    assert texts.listed(tree(), "layers") == []
    long = texts.listed(Everything.Params(word="x" * 200), "word")[0]
    assert long.startswith("word = 'xxx")
    assert long.endswith("xxx... (str)")


# --- Overrides ---


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("number=-4", -4),
        ("number = 0x10", 16),
        ("number=1_000", 1000),
        ("real=3", 3.0),
        ("real=1e-3", 1e-3),
        ("real=-inf", float("-inf")),
        ("flag=True", True),
        ("word=some/path:0.1-b", "some/path:0.1-b"),
        ("word=full,never", "full,never"),
        ("word=3", "3"),
        ("word=None", "None"),
        ("word=-1e5", "-1e5"),
        ("word='a b'", "a b"),
        ('word="=\\x41\\n"', "=A\n"),
        ("maybe=None", None),
        ("either=3", 3),
        ("either=x3", "x3"),
        ("either=None", None),
        ("literal=gpipe", "gpipe"),
        ("literal=2", 2),
        ("pair=[1, 2]", (1, 2.0)),
        ("pair[1]=7", 7.0),
        ("pair[-2]=7", 7),
        ("many=(1,)", (1,)),
        ("many=()", ()),
        ("words=['a', \"b\",]", ["a", "b"]),
        ("table={'a': [1], 'b': []}", {"a": [1], "b": []}),
        ("table.new=[3]", [3]),
        (f"kind={cases.__name__}.Wide", Wide),
        ("keras_layer=keras.layers.Dense", keras.layers.Dense),
        (f"function={cases.__name__}.double", double),
        ("child.name=x", "x"),
        ("anything=[(1, 2.5), {'a': None}, 'x']", [(1, 2.5), {"a": None}, "x"]),
    ],
)
def test_override_sets_one_field(assignment: str, value: Any) -> None:
    path = assignment.partition("=")[0].strip()
    one = Everything.Params()
    assert one.override(assignment) is one
    assert one.get(path) == value
    assert isinstance(one.get(path), type(value))


class Unions(hyperparams.Params):
    sizes: tuple[int, ...] | dict[str, float] | None = field((1, 2), "Numbers, named or not.")
    red: Literal["red", None] = field(None, "A colour.")
    kind: type | None = field(None, "Any class.")


def test_override_of_unions_takes_the_type_that_fits() -> None:
    one = Unions()
    assert one.override("sizes[1]=5").sizes == (1, 5)
    assert message(lambda: one.override("sizes[0]=x")).endswith("'sizes[0]' must be int, got x")
    assert message(lambda: one.set(sizes=[3, "x"])).endswith(
        "'sizes[1]' must be int, got 'x' (str)"
    )
    assert repr(one.set(sizes={"a": 1.0}).override("sizes.a=2").sizes) == "{'a': 2.0}"
    assert one.override("red=red").red == "red"
    assert message(lambda: one.override("red=blue")).endswith("or None, got blue")
    assert one.override("kind=keras.layers.Dense").kind is keras.layers.Dense


def test_none_takes_the_place_of_params_that_need_not_be_there() -> None:
    one = tree().set({"model.head": Dense.Params(units=3)})
    assert one.override("model.head=None") == tree()
    assert message(lambda: one.override("model=None")).endswith(
        "'model' must be Stack.Params, got None (NoneType)"
    )


def test_the_name_of_a_class_means_its_params() -> None:
    train = task.Train()
    logger = callbacks.CSVLogger.Params
    train.override("callbacks=[callbacks.CSVLogger, callbacks.CSVLogger]")
    train.override("callbacks[1].file=x.csv")
    assert train.callbacks == (logger(), logger(file="x.csv"))
    assert repr(train.override("callbacks=[callbacks.Callback]").callbacks) == "(Callback(),)"
    optimizer = optim.Optimizer.Params(learning_rate=0.1)
    optimizer.override("learning_rate=optim.InverseSquareRoot")
    assert optimizer.learning_rate == optim.InverseSquareRoot.Params()
    optimizer.override("learning_rate=optim.WarmupStaircase").override("learning_rate.peak=0.5")
    assert optimizer.learning_rate == optim.WarmupStaircase.Params(peak=0.5)
    assert optimizer.copy().override("learning_rate=0.1").learning_rate == 0.1
    assert train.copy().override("callbacks=()").callbacks == ()
    assert "has no class 'optim.WarmupStair'; nearest 'optim.WarmupStaircase'" in message(
        lambda: optimizer.override("learning_rate=optim.WarmupStair")
    )
    assert "'callbacks': 'os.system' is not in a registered package" in message(
        lambda: train.override("callbacks=[os.system]")
    )
    assert "'callbacks[0]' must be Callback.Params, got optim.Average" in message(
        lambda: task.Train().override("callbacks=[optim.Average]")
    )


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("number", "'number' is not an override; write path=value"),
        ("number=", "'number': cannot read '' as a literal"),
        ("number=four", "'number' must be int, got four"),
        ("number='4'", "'number' must be int, got '4' (str)"),
        ("number=1+1", "'number': cannot read '1+1' as a literal"),
        ("number=9**9**9", "without operators or calls"),
        ("flag=true", "'flag' must be bool, got true"),
        ("word=a b", "'word': cannot read 'a b' as a literal, whose strings are in quotes"),
        ("word='a", "'word': cannot read \"'a\" as a literal"),
        ("number=[1)", "'number': cannot read '[1)' as a literal"),
        ("number=1,2", "'number' must be int, got (1, 2) (tuple)"),
        ("words={'a'}", "it must be a constant, a container or a name"),
        ("words=[a]", "'words[0]' must be str, got a"),
        ("literal=pipe", "'literal' must be 'gpipe' or 2 or None, got pipe"),
        ("kind=Wide", "'kind': 'Wide' is not in a registered package ("),
        ("kind={name}", "'kind' must be type[Layer], got {name}"),
        ("anything=x", "'anything': 'x' is not in a registered package ("),
        ("child=3", "'child' must be Layer.Params, got 3 (int)"),
        ("table={'a': [1], 'a': [2]}", "the key 'a' is repeated"),
        ("table={3: []}", "the key 3 is not a string"),
        ("anything=None.x", "'anything': cannot read 'None.x' as a literal"),
    ],
)
def test_a_wrong_override_is_reported(assignment: str, expected: str) -> None:
    name = here("Everything")
    one = Everything.Params(pairs=((Dense.Params(), 1),))
    before = one.copy()
    text = message(lambda: one.override(assignment.replace("{name}", name)))
    assert text.startswith((name, "'number' is not"))
    assert expected.replace("{name}", name) in text
    assert one == before
