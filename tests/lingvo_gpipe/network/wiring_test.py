"""The named stream: versions, direct routes to every reader, errors for wrong names."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe import errors
from lingvo_gpipe.network import wiring as stream

Node = stream.Node


def names(wiring: stream.Wiring, versions: Sequence[int]) -> list[str]:
    return [wiring.versions[v].name for v in versions]


def test_a_name_written_again_is_a_new_version() -> None:
    wiring = stream.wire([Node("a"), Node("b"), Node("c")], ["x"])
    assert [(v.name, v.producer, v.consumers) for v in wiring.versions] == [
        ("x", stream.FIELD, (0,)),
        ("x", 0, (1,)),
        ("x", 1, (2,)),
        ("x", 2, ()),
    ]
    assert wiring.reads == ((0,), (1,), (2,))
    assert wiring.outputs == {"x": 3}


def test_a_layer_reading_a_name_twice_is_one_consumer() -> None:
    wiring = stream.wire([Node("add", ("x", "x"), ("y",))], ["x"])
    assert wiring.reads == ((0, 0),)
    assert wiring.versions[0].consumers == (0,)


SKIPS = [
    Node("a", ("x",), ("p",)),
    Node("b", ("p",), ("q",)),
    Node("c", ("q",), ("r",)),
    Node("d", ("r", "p"), ("s",)),
    Node("e", ("s", "p", "label"), ("t",)),
]


def test_several_consumers_are_sent_to_straight() -> None:
    wiring = stream.wire(SKIPS, ["x", "label"])
    routes = stream.route(wiring, (1, 1, 1, 1, 1))
    imports = [names(wiring, r.imports) for r in routes]
    # p goes from cell 0 to cells 1, 3 and 4, not through 2; label goes only to the last cell.
    assert imports == [["x"], ["p"], ["q"], ["p", "r"], ["label", "p", "s"]]
    assert [names(wiring, r.exports) for r in routes] == [["p"], ["q"], ["r"], ["s"], []]


def test_what_a_loss_or_metric_writes_may_stay_unread() -> None:
    head = Node("head", ("x", "label"), ("y",), compares=True)
    wiring = stream.wire([Node("a"), head], ["x", "label"], outputs=("x",))
    assert wiring.outputs == {"x": 2}


@pytest.mark.parametrize("nest", ["a", ("a",), ["b", "a"], {"one": "a", "two": ["b", {"c": "d"}]}])
def test_values_go_by_name_and_back_into_their_structure(nest: Any) -> None:
    values = dict(zip("abd", (1, 2, 3), strict=True))
    structured = stream.in_structure(nest, values)
    assert stream.by_name(nest, structured) == {name: values[name] for name in stream.names(nest)}


@pytest.mark.parametrize(
    ("nest", "value", "text"),
    [
        (["a", "b"], (1,), "a call takes [a, b], got [a tensor]. Use that structure, or a "),
        ({"one": "a"}, {"on": 1}, "a call takes {one: a}, got {on: a tensor}. Use that structure"),
        ({"one": ["a"]}, {"one": 1}, "a call takes [a], got a tensor. Use that structure, or a d"),
    ],
)
def test_values_of_another_structure_are_refused(nest: Any, value: Any, text: str) -> None:
    with pytest.raises(errors.InputError, match=re.escape(text)):
        stream.by_name(nest, value)


def test_what_is_not_a_name_is_refused() -> None:
    with pytest.raises(errors.LayerError, match="3 is not a name"):
        stream.names(["a", 3])


@pytest.mark.parametrize(
    ("nodes", "outputs", "text"),
    [
        (
            [Node("d0", ("imgae",))],
            (),
            "d0 reads 'imgae', which no field or layer before it writes; nearest 'image'",
        ),
        (
            [Node("d0", ("zzz",))],
            (),
            "d0 reads 'zzz', which no field or layer before it writes; there are 'image', 'label'",
        ),
        (
            [Node("d0", ("late",)), Node("d1", ("image",), ("late",))],
            (),
            "d0 reads 'late', which only d1 after it writes. Move it up",
        ),
        (
            [Node("d0", ("late",), ("late",))],
            (),
            "d0 reads 'late', which no field or layer before it writes; nearest 'label'",
        ),
        (
            [Node("d0", ("image",), ("feature",)), Node("d1", ("image", "features"))],
            (),
            "d1 reads 'features', which no field or layer before it writes; nearest 'feature'",
        ),
        (
            [Node("d0", ("image",), ("lable",)), Node("d1", ("image", "label"))],
            (),
            "d0 writes 'lable', which no layer after it reads; nearest name read after it "
            "'label'. Read it, or add it to the network's outputs",
        ),
        (
            [Node("d0", ("image",)), Node("d1", ("image",))],
            (),
            "d0 writes 'x', which no layer after it reads. Read it, or add it to the network's "
            "outputs",
        ),
        (
            [Node("d0", ("image",), ("logits",))],
            ("logit",),
            "output 'logit' is neither a field nor written by a layer; nearest 'logits'. Correct "
            "the network's outputs",
        ),
        (
            [Node("d0", ("image",), ("y", "y"))],
            (),
            "d0 writes a name twice: y, y. Give each of its outputs a different name",
        ),
        (
            [Node("d0", ("image",)), Node("head", ("x", "label"), ()), Node("d1")],
            (),
            "head writes no name. Give its output a name; if no layer reads it, "
            "add that name to the network's outputs",
        ),
    ],
)
def test_wrong_names_are_reported_with_the_nearest(
    nodes: list[Node], outputs: tuple[str, ...], text: str
) -> None:
    with pytest.raises(errors.LayerError) as error:
        stream.wire(nodes, ["image", "label"], outputs)
    assert str(error.value) == text


def test_differentiable_is_what_weights_flow_into() -> None:
    nodes = [
        Node("frozen", ("x",), ("a",)),
        Node("trained", ("a",), ("b",)),
        Node("plain", ("b", "a"), ("c",)),
        Node("aside", ("a",), ("d",)),
        Node("last", ("c", "d"), ("e",)),
    ]
    wiring = stream.wire(nodes, ["x"])
    found = stream.differentiable(wiring, [False, True, False, False, False])
    assert names(wiring, sorted(found)) == ["b", "c", "e"]
    assert stream.differentiable(wiring, [False] * 5) == frozenset()


def test_differentiable_by_fields_is_everything_after_them() -> None:
    wiring = stream.wire(SKIPS, ["x", "label"])
    found = stream.differentiable(wiring, [False] * 5, from_fields=True)
    assert found == frozenset(range(len(wiring.versions)))


# --- any network, any cut -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Drawn:
    nodes: list[Node]
    outputs: tuple[str, ...]
    cuts: tuple[int, ...]


@st.composite
def networks(draw: Any) -> Drawn:
    """Layers with few names, so that versions, skips and several consumers are frequent."""
    length = draw(st.integers(1, 8))
    unread: set[str] = set()
    known = ["x", "y"]
    nodes = []
    for number in range(length):
        reads = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
        unread -= set(reads)
        pool = [name for name in ("x", "y", "a", "b", "c") if name not in unread]
        pool.append(f"n{number}")
        writes = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=2, unique=True))
        unread |= set(writes)
        known = sorted({*known, *writes})
        nodes.append(Node(f"layer{number}", tuple(reads), tuple(writes)))
    more = draw(st.lists(st.sampled_from(known), max_size=2))
    borders = draw(st.sets(st.integers(1, length - 1))) if length > 1 else set()
    ends = [0, *sorted(borders), length]
    return Drawn(
        nodes,
        tuple(dict.fromkeys([*sorted(unread), *more])),
        tuple(b - a for a, b in itertools.pairwise(ends)),
    )


@hypothesis.given(networks())
def test_versions_are_what_a_plain_walk_over_names_finds(drawn: Drawn) -> None:
    wiring = stream.wire(drawn.nodes, ["x", "y"], drawn.outputs)
    holds = {"x": (stream.FIELD, "x"), "y": (stream.FIELD, "y")}
    for number, node in enumerate(drawn.nodes):
        found = [
            (wiring.versions[v].producer, wiring.versions[v].name) for v in wiring.reads[number]
        ]
        assert found == [holds[name] for name in node.reads]
        holds.update({name: (number, name) for name in node.writes})
    for name, v in wiring.outputs.items():
        assert (wiring.versions[v].producer, wiring.versions[v].name) == holds[name]


@hypothesis.given(networks())
def test_imports_and_exports_are_complete_and_no_more(drawn: Drawn) -> None:
    wiring = stream.wire(drawn.nodes, ["x", "y"], drawn.outputs)
    leaving = set(wiring.outputs.values())
    routes = stream.route(wiring, drawn.cuts, leaving)
    sent = {v.index for v in wiring.versions if v.producer == stream.FIELD}
    needed: list[set[int]] = []
    for route in routes:
        assert set(route.imports) <= sent  # an earlier cell sends each import
        holds = set(route.imports)
        read = set()
        for n in route.layers:
            assert set(wiring.reads[n]) <= holds  # each value read is received or made here
            read |= set(wiring.reads[n])
            holds |= set(wiring.writes[n])
        assert set(route.imports) <= read  # each import is read
        made = {v for n in route.layers for v in wiring.writes[n]}
        assert set(route.exports) <= made  # nothing is passed through
        assert list(route.imports) == sorted(route.imports)
        assert list(route.exports) == sorted(route.exports)
        sent |= set(route.exports)
        needed.append(set(route.imports))
    assert leaving <= sent
    for k, route in enumerate(routes):
        later = set().union(*needed[k + 1 :]) | leaving
        assert set(route.exports) <= later  # each export is read later
    assert [len(route.layers) for route in routes] == list(drawn.cuts)
