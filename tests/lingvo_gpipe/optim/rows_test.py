"""Updates of only those rows of a table that have a gradient: in NumPy, and bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers, network, optim, packing, pipelining, task
from lingvo_gpipe.input import InMemory
from lingvo_gpipe.layers import base
from lingvo_gpipe.run import learner, loop
from tests.support import saved

Array = np.ndarray[Any, Any]

ROWS, UNITS = 7, 5
# Rows with a gradient in each of five updates: row 6 in none of them, row 2 in one.
TOUCHED: tuple[list[int], ...] = ([0, 1, 4], [1, 2], [], [0, 5, 3], [1])
# All exact in float32, by way of which Keras takes some of its constants.
BETA, BETA_2, RATE, EPSILON = 0.875, 0.75, 0.0625, 2.0**-20
RULES: dict[str, dict[str, Any]] = {
    "Adam": {
        "name": "Adam",
        "config": {"beta_1": BETA, "beta_2": BETA_2, "epsilon": EPSILON},
    },
    "AMSGrad": {"name": "Adam", "config": {"amsgrad": True}},
    "AdamW": {"name": "AdamW", "config": {"weight_decay": 0.1}},
    "SGD": {"name": "SGD"},
    "momentum": {"name": "SGD", "config": {"momentum": BETA}},
    "nesterov": {
        "name": "SGD",
        "config": {"momentum": BETA, "nesterov": True, "weight_decay": 0.1},
    },
    "Nadam": {"name": "Nadam"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "Keras' RMSprop": {"name": "RMSprop", "config": {"momentum": BETA, "centered": True}},
    "Adagrad": {"name": "Adagrad"},
    "RMSProp": {"rule": optim.RMSProp.Params(momentum=BETA)},
    "clipped Adam": {"name": "Adam", "config": {"clipnorm": 0.5}},
    "Lamb": {"name": "Lamb"},
    "Adafactor": {"rule": optim.Adafactor.Params(min_factored=2, momentum=BETA)},
}


def draw(seed: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    return np.asarray(np.random.RandomState(seed).randn(*shape), dtype)


def gradient(number: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """Return the gradient of an update, zero except in its rows; one element of those is 0 too."""
    value = np.zeros(shape, dtype)
    touched = TOUCHED[number]
    value[touched] = draw(number + 1, (len(touched), *shape[1:]), dtype)
    value[touched, ..., 0] = 0.0
    return value


class Tables:
    """Two tables of equal values, of which the second may be lazy, and their updater."""

    def __init__(
        self,
        rule: str,
        lazy: tuple[str, ...] = (),
        *,
        shape: tuple[int, ...] = (ROWS, UNITS),
        dtype: Any = np.float32,
        **more: Any,
    ) -> None:
        self.shape = shape
        self.weights = {p: tf.Variable(draw(0, shape, dtype)) for p in ("plain/t", "lazy/t")}
        specs = {
            path: base.VariableSpec(path, shape, v.dtype, base.initializer("zeros"))
            for path, v in self.weights.items()
        }
        own = optim.Optimizer.Params(learning_rate=RATE, lazy=lazy, **RULES[rule])
        self.updater: optim.Updater = optim.Updater.Params(optimizer=own, **more).instantiate(
            variables=self.weights,
            specs=specs,
            device_of=lambda _: "CPU:0",
            layer_of=lambda path: path.split("/")[0],
        )

    def apply(self, value: Array, number: int, **more: Any) -> dict[str, Any]:
        step = tf.constant(number, tf.int64)
        given = dict.fromkeys(self.weights, tf.constant(value))
        return self.updater.apply(given, step=step, **more)

    def run(self) -> None:
        dtype = next(iter(self.weights.values())).dtype.as_numpy_dtype
        for number in range(len(TOUCHED)):
            self.apply(gradient(number, self.shape, dtype), number)

    def values(self, path: str = "lazy/t") -> dict[str, Array]:
        slots = {slot: v for (owner, slot), v in self.updater.slots.items() if owner == path}
        found = {"weight": self.weights[path], **slots}
        if path in self.updater.averages:
            found["average"] = self.updater.averages[path]
        return {name: v.numpy() for name, v in found.items()}


def same(one: Mapping[str, Array], other: Mapping[str, Array]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value, err_msg=name, strict=True)


# --- against NumPy --------------------------------------------------------------------------------


def numpy_adam(weight: Array, gradients: list[Array]) -> dict[str, Array]:
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for t, g in enumerate(gradients, 1):
        for row in np.flatnonzero(g.any(1)):
            m[row] = BETA * m[row] + (1 - BETA) * g[row]
            v[row] = BETA_2 * v[row] + (1 - BETA_2) * g[row] ** 2
            rate = RATE * np.sqrt(1 - BETA_2**t) / (1 - BETA**t)
            weight[row] -= rate * m[row] / (np.sqrt(v[row]) + EPSILON)
    return {"weight": weight, "momentums": m, "velocities": v}


def numpy_momentum(weight: Array, gradients: list[Array]) -> dict[str, Array]:
    m = np.zeros_like(weight)
    for g in gradients:
        for row in np.flatnonzero(g.any(1)):
            m[row] = BETA * m[row] - RATE * g[row]
            weight[row] += m[row]
    return {"weight": weight, "momentums": m}


REFERENCES: dict[str, Callable[[Array, list[Array]], dict[str, Array]]] = {
    "Adam": numpy_adam,
    "momentum": numpy_momentum,
}


@pytest.mark.parametrize("rule", list(REFERENCES))
def test_five_updates_are_those_of_numpy(rule: str) -> None:
    tables = Tables(rule, ("lazy/*",), dtype=np.float64)
    tables.run()
    gradients = [gradient(number, tables.shape, np.float64) for number in range(len(TOUCHED))]
    expected = REFERENCES[rule](draw(0, tables.shape, np.float64), gradients)
    values = tables.values()
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-11, atol=1e-13, err_msg=name)
    np.testing.assert_array_equal(values["weight"][6], draw(0, tables.shape, np.float64)[6])
    assert (values["weight"] != tables.values("plain/t")["weight"]).any()


# --- bit by bit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(RULES))
def test_rows_with_a_gradient_get_the_bits_of_the_whole_update(rule: str) -> None:
    """Each update begins with equal values in both tables."""
    found = Tables(
        rule, ("lazy/*",), clip_norm=0.5, weight_decay=optim.WeightDecay.Params(kernel=0.1)
    )
    for number, touched in enumerate(TOUCHED):
        before = found.values()
        for (path, slot), variable in found.updater.slots.items():
            if path == "plain/t":
                variable.assign(before[slot])
        found.weights["plain/t"].assign(before["weight"])
        found.apply(gradient(number, found.shape), number)
        plain, lazy = found.values("plain/t"), found.values()
        for name, value in lazy.items():
            if value.shape[:1] == (ROWS,):
                untouched = [row for row in range(ROWS) if row not in touched]
                np.testing.assert_array_equal(value[touched], plain[name][touched])
                np.testing.assert_array_equal(value[untouched], before[name][untouched])
            else:
                np.testing.assert_array_equal(value, plain[name])


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(
    "shape", [(1001, 37), pytest.param((301, 3, 11), marks=pytest.mark.sameness_grid)], ids=str
)
def test_a_table_all_of_whose_rows_have_a_gradient_is_updated_as_without(
    rule: str, shape: tuple[int, ...]
) -> None:
    tables = Tables(rule, ("lazy/*",), shape=shape)
    for number in range(3):
        tables.apply(draw(number + 1, shape), number)
    same(tables.values(), tables.values("plain/t"))


# --- beside what else an update does --------------------------------------------------------------


def test_weight_decay_leaves_rows_without_gradient_and_the_norm_counts_them() -> None:
    decay = optim.WeightDecay.Params(kernel=0.1)
    lazy, plain = (Tables("SGD", p, weight_decay=decay) for p in (("*",), ()))
    one, other = (tables.apply(gradient(0, tables.shape), 0) for tables in (lazy, plain))
    for name in ("gradient_norm", "weight_decay_loss"):
        np.testing.assert_array_equal(one[name], other[name])
    start = draw(0, lazy.shape)
    changed = (lazy.values()["weight"] != start).any(1)
    np.testing.assert_array_equal(np.flatnonzero(changed), TOUCHED[0])
    assert (plain.values()["weight"] != start).any(1).all()


def test_averages_of_all_rows_go_on() -> None:
    found = Tables("SGD", ("*",), average=optim.Average.Params(decay=0.5, warmup=False))
    found.apply(gradient(0, found.shape), 0)
    before = found.values()
    found.apply(gradient(2, found.shape), 1)  # no row has a gradient
    after = found.values()
    np.testing.assert_array_equal(after["weight"], before["weight"])
    expected = before["average"] + 0.5 * (before["weight"] - before["average"])
    np.testing.assert_allclose(after["average"], expected, rtol=1e-6)
    assert (after["average"] != before["average"]).any(1)[TOUCHED[0]].all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_changes_nothing_with_the_guard_and_its_rows_without(bad: float) -> None:
    given = gradient(0, (ROWS, UNITS))
    given[3, 1] = bad
    guarded, open_ = (Tables("Adam", ("*",), finite_guard=guard) for guard in (True, False))
    before = guarded.values()
    assert not guarded.apply(given, 0)["finite"]
    same(guarded.values(), before)
    open_.apply(given, 0)
    assert np.isnan(open_.values()["weight"][3]).any()
    np.testing.assert_array_equal(open_.values()["weight"][6], before["weight"][6])


def test_a_loss_scale_changes_no_bit() -> None:
    scaled = Tables("Adam", ("*",), loss_scale=optim.LossScale.Params(initial=1024.0))
    plain = Tables("Adam", ("*",))
    for number in range(len(TOUCHED)):
        scale = scaled.updater.loss_scale
        assert scale is not None
        value = gradient(number, plain.shape)
        scaled.apply(value * scale.numpy(), number, loss_scale=scale)
        plain.apply(value, number)
    same(scaled.values(), plain.values())


# --- in a network ---------------------------------------------------------------------------------


class Words(InMemory):
    """Sentences of 3 of 20 ids with a label; ids above 15 do not occur."""

    class Params(InMemory.Params):
        """Params of Words."""

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        return {"ids": tf.TensorSpec([3], tf.int32), "label": tf.TensorSpec([], tf.int32)}

    def arrays(self) -> Mapping[str, Mapping[str, Array]]:
        random = np.random.RandomState(1)
        ids = random.randint(0, 16, (32, 3)).astype(np.int32)
        return {"train": {"ids": ids, "label": ids[:, 0] % 2}, "test": {}}


def words_task(**train: Any) -> Any:
    own = {
        "optimizer": optim.Optimizer.Params(name="Adam", learning_rate=0.1, lazy=("words/table",)),
        "clip_norm": 0.5,
        "max_steps": 6,
        "save_interval_steps": 3,
        "log_interval_steps": 1,
    }
    return task.Task.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=[
                layers.Embedding.Params(name="words", vocabulary=20, units=4, reads=("ids",)),
                layers.Flatten.Params(name="flat"),
                layers.Softmax.Params(name="head", classes=2, reads=("x", "label")),
            ],
            num_partitions=2,
            num_micro_batches=2,
            seed=3,
        ),
        input=Words.Params(batch_size=4),
        train=task.Train(**{**own, **train}),
    )


# A mini-batch of two micro-batches; replicas take one each.
FIRST, SECOND = [[0, 1, 2], [2, 2, 3], [7, 7, 8], [8, 9, 7]], [[3, 4, 2], [3, 3, 3]] * 2


def learned(num_replicas: int, *batches: list[list[int]], dtype: str = "float64") -> Any:
    params = words_task()
    params.model.set(num_replicas=num_replicas, dtype=dtype)
    given = [{"ids": tf.constant(b), "label": tf.constant([0, 1, 1, 0])} for b in batches]
    made = learner.Learner(params, given[0])
    before = made.pipe.by_path["words/table"].numpy()
    made.update(given)
    after = {key: variable.numpy() for key, variable in made.variables.items()}
    changed = (after["variables/words/table"] != before).any(1)
    return after, set(np.flatnonzero(changed))


def test_rows_of_any_mini_batch_and_replica_count() -> None:
    one, touched = learned(1, FIRST, SECOND)
    assert touched == {0, 1, 2, 3, 4, 7, 8, 9}
    two, again = learned(2, FIRST, SECOND)
    assert again == touched
    for key, value in one.items():
        np.testing.assert_allclose(two[key], value, rtol=1e-9, atol=1e-12, err_msg=key)
    assert learned(2, FIRST)[1] == {0, 1, 2, 3, 7, 8, 9}


def test_variables_on_workers_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = learned(1, FIRST, SECOND, dtype="float32")
    monkeypatch.setattr(packing, "is_packed", lambda _: True)
    packed, _ = learned(1, FIRST, SECOND, dtype="float32")
    same(packed, plain)


def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    whole = loop.run(words_task(), tmp_path / "whole")
    for max_steps in (2, 5, 6):
        parts = loop.run(words_task(max_steps=max_steps), tmp_path / "parts")
    same(saved.values(parts.checkpoint), saved.values(whole.checkpoint))


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(REFUSED))
def test_an_optimizer_that_needs_whole_weights_is_refused(rule: str) -> None:
    own = optim.Optimizer.Params(learning_rate=RATE, lazy=("*",), **REFUSED[rule]).instantiate()
    with pytest.raises(errors.ParamsError, match="does not compute each row by itself"):
        own.lazy_paths({})


def make(net: list[Any], *patterns: str, lazy: Collection[str] = ("emb/table",)) -> None:
    ids = tf.TensorSpec([4, 3], tf.int32)
    params = pipelining.PipeliningLayer.Params(layers=net)
    specs = network.analyze(params, {"ids": ids, "label": ids}).variables
    own = optim.Optimizer.Params(name="SGD", learning_rate=0.1, lazy=patterns).instantiate()
    assert own.lazy_paths(specs) == set(lazy)


def embedding(name: str, reads: str = "ids", **more: Any) -> Any:
    return layers.Embedding.Params(name=name, vocabulary=9, units=4, reads=(reads,), **more)


def head(**more: Any) -> Any:
    return layers.SequenceSoftmax.Params(name="head", vocabulary=9, reads=("x", "label"), **more)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("embed/table", "pattern 'embed/table' matches no weight; nearest emb/table"),
        ("head/bias", r"'head/bias' matches head/bias of shape \[9\], which has no rows; nearest"),
        ("head/kernel", "matches head/kernel, the kernel of a softmax over its rows: all of them"),
    ],
)
def test_a_pattern_that_matches_no_sparse_table_is_refused(pattern: str, text: str) -> None:
    with pytest.raises(errors.ParamsError, match=rf"^optimizer.lazy: .*{text}"):
        make([embedding("emb", writes=("x",)), head()], "emb/*", pattern)


def test_a_table_that_a_softmax_shares_is_refused() -> None:
    tied = head(tie={"kernel": "emb/table"})
    with pytest.raises(errors.ParamsError, match=r"emb/table, the kernel of .* or the tie$"):
        make([embedding("emb", writes=("x",)), tied], "emb/table")


def test_a_table_that_two_embeddings_share_is_lazy() -> None:
    other = embedding("other", "label", writes=("y",), tie={"table": "emb/table"})
    both = layers.Add.Params(reads=("x", "y"), writes=("x",))
    make([embedding("emb", writes=("x",)), other, both, head()], "emb/*")


def sliced_net(**more: Any) -> list[Any]:
    return [
        layers.Embedding.Params(
            name="emb", vocabulary=9, units=4, slices=2, reads=("ids",), writes=("x",)
        ),
        layers.SequenceSoftmax.Params(
            name="head", vocabulary=9, slices=2, reads=("x", "label"), **more
        ),
    ]


def test_slices_of_a_table_that_slices_of_a_softmax_share_are_refused() -> None:
    tied = sliced_net(tie={"kernel": "emb/table"})
    text = r"^optimizer.lazy: pattern 'emb_\*' matches emb_0/table, the kernel of .* or the tie$"
    with pytest.raises(errors.ParamsError, match=text):
        make(tied, "emb_*")
    make(sliced_net(), "emb_*", lazy={"emb_0/table", "emb_1/table"})
