"""Params: declared, typed, held by value; every error with its text."""

from __future__ import annotations

import abc
import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from lingvo_gpipe import hyperparams
from lingvo_gpipe.hyperparams import REQUIRED, field
from tests.lingvo_gpipe.hyperparams.cases import (
    Dense,
    Everything,
    Layer,
    Other,
    Section,
    Stack,
    Wide,
    double,
    here,
    message,
    tree,
)

# --- Declaring ---


def test_fields_have_name_type_default_and_help() -> None:
    fields = Dense.Params.fields()
    assert list(fields) == ["name", "units", "rate", "use_bias"]
    assert (fields["rate"].name, fields["rate"].type, fields["rate"].default) == (
        "rate",
        float,
        0.5,
    )
    assert fields["rate"].help == "Share that is dropped."
    assert fields["units"].default is REQUIRED


def test_a_subclass_sets_another_default_by_plain_assignment() -> None:
    assert Other.Params().name == "other"
    assert Layer.Params().name == "layer"
    assert Other.Params.fields()["name"].help == "Name."


def test_a_class_without_params_gets_its_own() -> None:
    assert Wide.Params is not Dense.Params
    assert Wide.Params.owner is Wide
    assert Dense.Params.owner is Dense
    assert isinstance(Wide.Params(units=1).instantiate(), Wide)
    assert Section.owner is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"__annotations__": {"a": int}}, "'a' is not a field; write a: type = field(default, h"),
        ({"__annotations__": {"a": int}, "a": 3}, "'a' is not a field; write a: type = field("),
        ({"a": field(3, "An int.")}, "'a' is not a field; write a: type = field(default, help)"),
        ({"unit": 3}, "'unit' is not a field; write unit: type = field(default, help)"),
        (
            {"__annotations__": {"copy": int}, "copy": field(3, "An int.")},
            "'copy' cannot be a field's name: Params use it themselves",
        ),
    ],
)
def test_declaring_a_field_wrongly_is_refused(body: dict[str, Any], expected: str) -> None:
    text = message(lambda: types.new_class("P", (Dense.Params,), {}, lambda to: to.update(body)))
    assert text.startswith(f"P: {expected}")


def test_a_subclass_may_replace_default_and_help_of_a_field() -> None:
    class P(Dense.Params):
        units = field(3, "Output channels.")

    class Same(P):
        units = 4

    found = P.fields()["units"]
    assert (P().units, found.help, found.type) == (3, "Output channels.", int)
    assert (Same().units, Same.fields()["units"].help) == (4, "Output channels.")
    assert Dense.Params.fields()["units"].help != found.help
    assert "must be int, got 'x'" in message(lambda: P().set_path("units", "x"))


def test_of_two_bases_the_nearer_default_counts() -> None:
    class Left(Layer):
        pass

    class Right(Layer):
        class Params(Layer.Params):
            name = "right"

    class Both(Left, Right):
        pass

    assert Both.Params().name == "right"
    assert Both.Params.fields()["name"].default == "right"


def test_params_of_another_class_are_refused() -> None:
    def unrelated() -> None:
        class Bad(Layer):
            class Params(hyperparams.Params):
                pass

    def borrowed() -> None:
        class Bad(Layer):
            Params = Dense.Params

    where = f"{__name__}.test_params_of_another_class_are_refused.<locals>."
    assert message(unrelated) == (
        f"{where}unrelated.<locals>.Bad.Params must inherit {here('Layer.Params')}"
    )
    assert message(borrowed) == (
        f"{where}borrowed.<locals>.Bad.Params belongs to {here('Dense')} already; declare a nested "
        "class that inherits it"
    )
    assert Dense.Params.owner is Dense


def test_a_wrong_default_names_its_field() -> None:
    class P(hyperparams.Params):
        a: list[int] = field(["x"], "Ints.")  # type: ignore[list-item]

    assert message(P) == (f"{P.class_name()}: the default of 'a[0]' must be int, got 'x' (str)")


def test_an_unresolvable_type_is_reported() -> None:
    class P(hyperparams.Params):
        a: Nowhere = field(None, "No such type.")  # type: ignore[name-defined]  # noqa: F821

    assert message(P) == (
        f"{P.class_name()}: the types of its fields cannot be resolved (name 'Nowhere' is not "
        "defined); name only what the module itself defines or imports"
    )


def test_an_unsupported_type_is_reported() -> None:
    class P(hyperparams.Params):
        a: frozenset[int] = field(frozenset(), "A set.")

    assert message(P) == (
        f"{P.class_name()}: the default of 'a': the type frozenset of a field is not supported"
    )


# --- By value ---


def test_what_is_assigned_is_copied() -> None:
    dense = Dense.Params(units=1)
    layers: list[Layer.Params] = [dense]
    stack = Stack.Params(layers=layers, head=dense)
    dense.units = 2
    layers.append(dense)
    assert len(stack.layers) == 1
    assert stack.get("layers[0].units") == 1
    assert stack.get("head.units") == 1
    everything = Everything.Params(pairs=((dense, 1),), children={"a": dense}, anything=[[dense]])
    dense.units = 3
    paths = ("pairs[0][0].units", "children.a.units", "anything[0][0].units")
    assert [everything.get(path) for path in paths] == [2, 2, 2]


def test_trees_share_no_default() -> None:
    one, other = Section(), Section()
    one.model.set_path("layers[0].units", 9)
    assert other.get("model.layers[0].units") == 1
    assert Section().get("model.layers[0].units") == 1


@pytest.mark.parametrize("copied", [Section.copy, copy.copy, copy.deepcopy])
def test_a_copy_shares_nothing(copied: Callable[[Section], Section]) -> None:
    one = tree()
    other = copied(one)
    assert other == one
    other.set({"model.layers[0].units": 7, "model.tie.a": "c"})
    assert one == tree()
    assert other != one


def test_containers_are_read_only() -> None:
    one = tree()
    expected = (
        "a {} in Params is read-only; assign a new one, or set an element by its path: "
        "p.set_path('field[0]', value)"
    )
    assert message(lambda: one.model.layers.append(Dense.Params())) == expected.format("list")
    assert message(lambda: one.model.tie.update(a="x")) == expected.format("dict")
    assert one == tree()


def test_setting_an_element_keeps_its_neighbours() -> None:
    one = tree()
    neighbour: Any = one.model.layers[2]
    one.set_path("model.layers[0]", Other.Params())
    neighbour.units = 11
    assert one.get("model.layers[2].units") == 11


def test_what_was_read_does_not_change_later() -> None:
    one = Everything.Params(words=["a", "b"], table={"a": [1]})
    words, table = one.words, one.table
    one.set({"words[0]": "c", "table.a[0]": 2})
    assert (words, table) == (["a", "b"], {"a": [1]})
    assert (one.words, one.table) == (["c", "b"], {"a": [2]})


def test_a_frozen_tree_refuses_every_change() -> None:
    one = tree().freeze()
    name = here("Section")
    expected = "{} is frozen: '{}' cannot be set; change a copy()"
    for path in ("num_micro_batches", "model.layers[0].units", "model.layers[0]", "model.tie.a"):
        assert message(functools.partial(one.set_path, path, 3)) == expected.format(name, path)

    def assign() -> None:
        one.model.layers[0].name = "x"

    assert message(assign) == expected.format(here("Dense"), "name")
    assert message(lambda: one.override("num_micro_batches=3")) == (
        expected.format(name, "num_micro_batches")
    )
    assert one.copy().set(num_micro_batches=3).num_micro_batches == 3


# --- Comparing ---


def test_equality_is_by_class_type_and_value() -> None:
    assert Dense.Params(units=1) == Dense.Params(units=1)
    assert Dense.Params(units=1) != Dense.Params(units=2)
    assert Dense.Params(units=1) != Wide.Params(units=1)
    assert Dense.Params() != Dense.Params(units=1)
    for one, other in [(1, 1.0), (True, 1), (0.0, -0.0), ([1], (1,)), ({"a": 1}, {"b": 1})]:
        assert Everything.Params(anything=one) != Everything.Params(anything=other)
        assert Everything.Params(anything=one) == Everything.Params(anything=one)
    assert Everything.Params(real=float("nan")) == Everything.Params(real=float("nan"))
    assert Dense.Params() != 3


def test_diff_lists_changed_removed_and_added_paths() -> None:
    one = tree()
    assert one.diff(one.copy()) == ""
    other = one.copy().set(num_micro_batches=4)
    other.model.layers = [Dense.Params(units=3), Dense.Params(units=5, name="x")]
    assert one.diff(other) == "\n".join(
        [
            "model.layers[0].units: 2 -> 3",
            f"model.layers[1].class: {here('Other')} -> {here('Dense')}",
            "model.layers[1].name: 'other' -> 'x'",
            "- model.layers[1].choice: 'gpipe'",
            f"- model.layers[2].class: {here('Dense')}",
            "- model.layers[2].name: 'layer'",
            "- model.layers[2].units: 4",
            "- model.layers[2].rate: 0.5",
            "- model.layers[2].use_bias: True",
            "num_micro_batches: 1 -> 4",
            "+ model.layers[1].units: 5",
            "+ model.layers[1].rate: 0.5",
            "+ model.layers[1].use_bias: True",
        ]
    )


def test_iter_paths_gives_all_leaves() -> None:
    one = Stack.Params(layers=[Dense.Params()])
    found = [(path, value, declared.name) for path, value, declared in one.iter_paths()]
    assert found == [
        ("name", "layer", "name"),
        ("layers[0].name", "layer", "name"),
        ("layers[0].units", REQUIRED, "units"),
        ("layers[0].rate", 0.5, "rate"),
        ("layers[0].use_bias", True, "use_bias"),
        ("head", None, "head"),
        ("tie", {}, "tie"),
    ]


def test_repr_shows_what_differs_from_the_defaults() -> None:
    assert repr(Dense.Params(units=3, rate=0.5)) == "Dense(units=3)"
    assert repr(REQUIRED) == "REQUIRED"


# --- Setting ---


def test_set_takes_names_and_dotted_paths() -> None:
    one = tree()
    assert one.set({"model.layers[0].units": 8, "model.tie.new": "x"}, num_micro_batches=2) is one
    assert one.set_path("model.layers[-1].units", 9) is one
    assert (one.get("model.layers[0].units"), one.get("model.layers[2].units")) == (8, 9)
    assert one.model.tie == {"a": "b", "new": "x"}
    assert one.num_micro_batches == 2
    everything = Everything.Params(pair=(1, 2.0), table={"a b": [1, 2]}, anything=({"x": (1,)},))
    everything.set({"pair[0]": 5, "table['a b'][1]": 6, "anything[0].x[0]": "deep"})
    assert everything.pair == (5, 2.0)
    assert everything.table == {"a b": [1, 6]}
    assert everything.anything == ({"x": ("deep",)},)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("real", 3, 3.0),
        ("real", np.float32(0.5), 0.5),
        ("maybe", np.int64(3), 3),
        ("flag", np.True_, True),
        ("many", (np.int32(1), 2), (1, 2)),
        ("maybe", None, None),
        ("pair", [1, 2], (1, 2.0)),
        ("words", ("a", "b"), ["a", "b"]),
        ("either", 3, 3),
        ("literal", 2, 2),
        ("kind", Wide, Wide),
        ("function", double, double),
        ("function", Dense, Dense),
        ("anything", {"a": [(), Dense, double]}, None),
    ],
)
def test_fitting_values_are_kept(name: str, value: Any, kept: Any) -> None:
    found = getattr(Everything.Params().set({name: value}), name)
    expected = value if name == "anything" else kept
    assert found == expected
    assert isinstance(found, type(expected))


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("number", "ten", "'number' must be int, got 'ten' (str)"),
        ("number", True, "'number' must be int, got True (bool)"),
        ("number", np.float64(1.0), "'number' must be int, got 1.0 (float)"),
        ("number", 1.0, "'number' must be int, got 1.0 (float)"),
        ("number", None, "'number' must be int, got None (NoneType)"),
        ("number", REQUIRED, "'number' must be int, got REQUIRED (_Required)"),
        ("real", "1", "'real' must be float, got '1' (str)"),
        ("real", 10**400, "'real' must be float, got 1" + "0" * 76 + "... (int)"),
        ("flag", 1, "'flag' must be bool, got 1 (int)"),
        ("maybe", "x", "'maybe' must be int or None, got 'x' (str)"),
        ("literal", "pipe", "'literal' must be 'gpipe' or 2 or None, got 'pipe' (str)"),
        ("literal", 2.0, "'literal' must be 'gpipe' or 2 or None, got 2.0 (float)"),
        ("pair", (1,), "'pair' must be tuple[int, float], got (1,) (tuple)"),
        ("pair", (1, "x"), "'pair[1]' must be float, got 'x' (str)"),
        ("many", 3, "'many' must be tuple[int, ...], got 3 (int)"),
        ("words", ["a", 3], "'words[1]' must be str, got 3 (int)"),
        ("words", "abc", "'words' must be list[str], got 'abc' (str)"),
        ("table", {3: []}, "'table' must be dict[str, list[int]], got {3: []} (dict)"),
        ("table", {"a b": [None]}, "'table['a b'][0]' must be int, got None (NoneType)"),
        ("table", {"a": 1}, "'table.a' must be list[int], got 1 (int)"),
        ("function", 3, "'function' must be a function or class or None, got 3 (int)"),
        ("child", 3, "'child' must be Layer.Params, got 3 (int)"),
        ("pairs", [(Dense.Params(), "x")], "'pairs[0][1]' must be int, got 'x' (str)"),
    ],
)
def test_a_value_of_the_wrong_type_says_what_was_expected(
    path: str, value: Any, expected: str
) -> None:
    one = Everything.Params()
    assert message(lambda: one.set_path(path, value)) == f"{here('Everything')}: {expected}"
    assert one == Everything.Params()


def test_references_of_the_wrong_class_are_refused() -> None:
    one = Everything.Params()
    name = here("Everything")
    assert message(lambda: one.set(kind=keras.layers.Dense)) == (
        f"{name}: 'kind' must be type[Layer], got {keras.layers.Dense!r} (type)"
    )
    dense = Dense.Params(units=1)
    assert message(lambda: one.set(anything=object())).startswith(
        f"{name}: 'anything' must be a value that a text can hold, got <object object"
    )
    assert message(lambda: Stack.Params().set(head=Other.Params())) == (
        f"{here('Stack')}: 'head' must be Dense.Params or None, got Other() (Params)"
    )
    assert Stack.Params(head=dense).head == dense


def test_a_list_within_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    text = message(lambda: Everything.Params(anything=endless))
    assert text.endswith("'anything' holds itself, or is nested too deep")


def test_wrong_names_find_the_nearest_of_the_whole_tree() -> None:
    one = tree()
    name = here("Section")

    def assign() -> None:
        one.num_microbatches = 3  # type: ignore[attr-defined]

    near = "nearest 'num_micro_batches'"
    expected = f"{name} has no field 'num_microbatches'; {near}"
    assert message(assign) == expected
    assert message(lambda: one.num_microbatches) == expected  # type: ignore[attr-defined]
    assert message(lambda: one.set(num_microbatches=3)) == expected
    assert message(lambda: one.override("num_microbatches=3")) == expected
    assert message(lambda: Section(num_microbatches=3)) == expected  # type: ignore[call-arg]
    for path, hint in {
        "unit": "nearest 'model.layers[0].units'",
        "model.layers[2].unit": "nearest 'model.layers[2].units'",
        "modle.layers": "nearest 'model.layers'",
        "model.num_micro_batches": near,
        "model.tie.b.c": "there is {'a': 'b'}",
        "model.zzz": "there is name, layers, head, tie",
        "num_micro_batches.x": "there is 1",
        "model.layers.zzz": None,
    }.items():
        text = message(functools.partial(one.set_path, path, 3))
        assert text.startswith(f"{name} has no field '{path}'; {hint or 'there is '}")
    assert not hasattr(one, "zzz")


def test_wrong_elements_and_paths_are_reported() -> None:
    one = tree()
    name = here("Section")
    assert message(lambda: one.set_path("model.layers[3].units", 1)) == (
        f"{name} has no 'model.layers[3].units': [3] of 3 elements"
    )
    for path in ("", ".", "a.", "a..b", "a[", "a[x]", "a[0]b", "a.[0]", "a b", "9"):
        assert message(functools.partial(one.get, path)) == (
            f"{path!r} is not a dotted path such as model.layers[0].units"
        )


# --- Required fields and instantiate ---


def test_a_required_field_must_be_set_before_it_is_read() -> None:
    expected = f"{here('Dense')}: required field 'units' is not set (int: Output features.)"
    assert message(lambda: Dense.Params().units) == expected
    assert message(lambda: Dense.Params().get("units")) == expected
    assert message(lambda: Dense.Params().instantiate()) == expected
    unset = Dense.Params(units=3).set(units=REQUIRED)
    assert message(lambda: unset.units) == expected


def test_instantiate_checks_the_whole_tree() -> None:
    one = Stack.Params(layers=[Dense.Params(units=1), Dense.Params()], head=Wide.Params())
    stack = here("Stack")
    assert message(one.instantiate) == (
        f"{stack}: required field 'layers[1].units' is not set "
        "(int: Output features.)\n"
        f"    {stack}: required field 'head.units' is not set "
        "(int: Output features.)"
    )


def test_instantiate_hands_over_a_thawed_copy() -> None:
    params = Dense.Params(units=3).freeze()
    dense = params.instantiate(1, key=2)
    assert type(dense) is Dense
    assert dense.params == params
    assert dense.params is not params
    assert dense.rest == ((1,), {"key": 2})
    dense.params.units = 4
    assert params.units == 3


def test_a_section_is_not_instantiated() -> None:
    assert message(tree().instantiate) == (
        f"{here('Section')} is a section of a tree, of which nothing is instantiated; instantiate "
        "one of its fields"
    )


class Shape(hyperparams.Configurable):
    class Params(hyperparams.Configurable.Params):
        pass

    @abc.abstractmethod
    def area(self) -> float: ...


class Square(Shape):
    class Params(Shape.Params):
        pass

    def area(self) -> float:
        return 1.0


def test_a_class_with_an_open_method_is_not_instantiated() -> None:
    assert message(Shape.Params().instantiate) == (
        "Shape leaves area to its subclasses. Define it there, or instantiate one of them"
    )
    assert Square.Params().instantiate().area() == 1.0
