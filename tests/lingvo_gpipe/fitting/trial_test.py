"""What people tried with `PipelinedModel` beside plain `fit`: files, mistakes, their classes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import PipeliningLayer, errors
from lingvo_gpipe.fitting import PipelinedModel
from tests.lingvo_gpipe.fitting import fit_cases

X = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
LABELS = {"price": X[:, :1] * 40, "kind": X[:, 1:2]}


def two_outputs() -> keras.Model:
    """Return a model whose outputs were made in another order than it lists their layers."""
    inputs = keras.Input([6], name="features")
    hidden = keras.layers.Dense(8, activation="tanh", name="hidden")(inputs)
    price = keras.layers.Dense(1, name="price")(hidden)
    kind = keras.layers.Dense(1, name="kind")(hidden)
    return keras.Model({"features": inputs}, {"price": price, "kind": kind})


def fitted(model: keras.Model) -> Any:
    keras.utils.set_random_seed(1)
    model.compile("adam", "mse")
    model.fit({"features": X}, LABELS, batch_size=6, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.mark.filterwarnings("ignore:__array__")
def test_a_saved_optimizer_goes_on_in_keras(tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    plain = two_outputs()
    twin = keras.models.clone_model(plain)
    twin.set_weights(plain.get_weights())
    fitted(plain)
    fitted(PipelinedModel(twin, 2, 2)).save(tmp_path / "trained.keras")
    loaded = keras.models.load_model(tmp_path / "trained.keras")
    paths = [
        [v.path.split("/")[-1] for v in model.optimizer.variables] for model in (plain, loaded)
    ]
    assert paths[0] == paths[1]
    for one, other in zip(plain.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_allclose(other.numpy(), one.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["fit", "predict"])
def test_a_missing_input_is_named(method: str) -> None:
    model = PipelinedModel(two_outputs(), 2)
    model.compile("adam", "mse")
    with pytest.raises(errors.InputError, match="has an input 'features', but the data has 'x'"):
        getattr(model, method)({"x": X}, *([LABELS] if method == "fit" else []), verbose=0)


def test_a_wrong_number_of_features_is_named() -> None:
    model = PipelinedModel(two_outputs(), 2)
    model.compile("adam", "mse")
    with pytest.raises(errors.InputError, match=r"input 'features' has shape \(12, 4\), but the"):
        model.fit({"features": X[:, :4]}, LABELS, verbose=0)


def test_cuts_count_the_layers_of_the_model() -> None:
    model = PipelinedModel(two_outputs(), 2, cuts=[1, 1])
    model.compile("adam", "mse")
    with pytest.raises(errors.PartitionError, match=r"cuts=\[1, 1\] sums to 2, but there are 3"):
        model.fit({"features": X}, LABELS, verbose=0)


def test_a_learning_rate_without_a_config_trains() -> None:
    class Warm(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            return 0.01 * keras.ops.cast(step + 1, "float32")

    model = PipelinedModel(two_outputs(), 2, schedule="auto")
    model.compile(keras.optimizers.Adam(Warm()), "mse")
    model.fit({"features": X}, LABELS, verbose=0)


def test_layers_and_symbolic_tensors_are_those_of_the_model() -> None:
    plain = two_outputs()
    model = PipelinedModel(plain, 2)
    assert model.layers == plain.layers
    assert model.output["kind"] is plain.output["kind"]
    keras.Model(model.input, model.get_layer("hidden").output)


class Applies(keras.layers.Layer):
    """A layer of a user's own, which may compare examples."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


class AddsLoss(Applies):
    def call(self, x: Any) -> Any:
        self.add_loss(self.function(x))
        return x


@pytest.mark.parametrize("loss", [keras.losses.Dice, keras.losses.Tversky])
def test_a_ratio_is_refused_though_the_first_labels_are_all_zero(loss: Any) -> None:
    x = keras.Input([6])
    y = keras.layers.Dense(3, "sigmoid")(keras.layers.Dense(8)(x))
    model = PipelinedModel(keras.Model(x, y), 2, 3)
    model.compile("sgd", loss())
    with pytest.raises(errors.LayerError, match="is not a sum over its examples"):
        model.train_on_batch(X, np.zeros_like(X[:, :3]))


def trained_with(layer: Any, num_micro_batches: int = 3) -> float:
    """Return the loss of one update with a layer, or operation, between two others."""
    x = keras.Input([6])
    y = keras.layers.Dense(3)(layer(keras.layers.Dense(8)(x)))
    model = PipelinedModel(keras.Model(x, y), 2, num_micro_batches)
    model.compile("sgd", "mse")
    return float(model.train_on_batch(X, X[:, :3]))


MIXES = {
    "mean": lambda x: x - keras.ops.mean(x, axis=0, keepdims=True),
    "flip": lambda x: keras.ops.flip(x, axis=0),
    "cumsum": lambda x: keras.ops.cumsum(x, axis=0),
    "sort": lambda x: keras.ops.sort(x, axis=0),
    "attention": lambda x: x + keras.ops.softmax(x @ keras.ops.transpose(x)) @ x,
}


@pytest.mark.parametrize("function", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("kind", [lambda f: f, keras.layers.Lambda, Applies])
def test_what_compares_examples_needs_one_micro_batch(function: Any, kind: Any) -> None:
    with pytest.raises(errors.LayerError, match=r"compares the examples .* Use one micro-batch"):
        trained_with(kind(function))
    if kind is Applies:
        assert np.isfinite(trained_with(kind(function), num_micro_batches=1))


def test_what_compares_examples_is_found_after_a_mini_batch_of_one() -> None:
    x = keras.Input([6])
    y = keras.layers.Dense(3)(MIXES["mean"](keras.layers.Dense(8)(x)))
    model = PipelinedModel(keras.Model(x, y), 2, 3)
    model.predict_on_batch(X[:1])
    with pytest.raises(errors.LayerError, match="compares the examples"):
        model.predict_on_batch(X)


@pytest.mark.parametrize("kind", [lambda f: f, keras.layers.Lambda, Applies])
def test_what_compares_features_is_no_matter(kind: Any) -> None:
    assert np.isfinite(trained_with(kind(lambda x: keras.ops.cumsum(x, axis=1))))


def test_of_a_layer_that_cannot_be_tried_the_shape_decides() -> None:
    def mean(x: Any) -> Any:
        if tf.executing_eagerly():
            raise ValueError("not on these numbers")
        return keras.ops.mean(x, axis=0, keepdims=True)

    with pytest.raises(errors.LayerError, match="compares the examples"):
        trained_with(Applies(mean))


def test_a_layer_is_tried_without_a_trace() -> None:
    """Its variables are as before, although it is called on examples together and apart."""

    class Counts(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            del shape
            self.calls = self.add_weight(shape=(), trainable=False, initializer="zeros")

        def call(self, x: Any) -> Any:
            self.calls.assign_add(1.0)
            return x

    layer = Counts()
    with pytest.raises(errors.LayerError, match="its call writes its variable"):
        trained_with(layer)
    assert float(layer.calls.value) == 0.0


@pytest.mark.parametrize("function", [lambda x: keras.ops.mean(x) ** 2, keras.ops.std])
def test_an_added_loss_that_compares_examples_is_said(function: Any) -> None:
    with pytest.warns(UserWarning, match="the loss that it adds compares examples with each other"):
        trained_with(AddsLoss(function))


class Endpoint(keras.layers.Layer):
    """Adds a mean over the labels that are kept: of each example, or of all together."""

    def __init__(self, ignored: int, axis: int | None) -> None:
        super().__init__()
        self.ignored, self.axis = ignored, axis

    def call(self, inputs: Any) -> Any:
        labels, outputs = inputs
        kept = keras.ops.cast(labels != self.ignored, outputs.dtype)
        losses = kept * (outputs - keras.ops.cast(labels, outputs.dtype)) ** 2
        count = keras.ops.maximum(keras.ops.sum(kept, self.axis), 1)
        self.add_loss(keras.ops.mean(keras.ops.sum(losses, self.axis) / count))
        return outputs


@pytest.mark.parametrize(
    ("ignored", "axis", "warned"),
    [(0, None, True), (-1, None, True), (-999, None, True), (-1, 1, False)],
)
def test_an_added_loss_that_counts_labels_is_said(
    ignored: int, axis: int | None, warned: bool
) -> None:
    x, labels = keras.Input([6]), keras.Input([5], dtype="int32")
    y = Endpoint(ignored, axis)([labels, keras.layers.Dense(5)(x)])
    model = PipelinedModel(keras.Model([x, labels], y), 2, 3)
    model.compile("sgd")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.train_on_batch([X, np.ones([len(X), 5], "int32")])
    assert any("or divides by how many have some label" in str(w.message) for w in found) == warned


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_loss_that_reads_a_variable_is_refused(num_micro_batches: int) -> None:
    weight = keras.Variable(0.5, name="beta")

    def annealed(labels: Any, outputs: Any) -> Any:
        return weight * keras.ops.mean((labels - outputs) ** 2, -1)

    x = keras.Input([6])
    model = keras.Model(x, keras.layers.Dense(3)(keras.layers.Dense(8)(x)))
    model = PipelinedModel(model, 2, num_micro_batches)
    model.compile("sgd", annealed)
    with pytest.raises(errors.LayerError, match="the loss 'annealed' reads the variable 'beta'"):
        model.train_on_batch(X, X[:, :3])


def test_a_metric_that_reads_a_variable_has_its_later_values() -> None:
    scale = keras.Variable(2.0, trainable=False)

    def in_units(labels: Any, outputs: Any) -> Any:
        return scale * keras.ops.mean(keras.ops.abs(labels - outputs), -1)

    x = keras.Input([6])
    plain = keras.Model(x, keras.layers.Dense(3)(keras.layers.Dense(8)(x)))
    model = PipelinedModel(plain, 2, 3)
    model.compile("sgd", "mse", metrics=[in_units])
    before = model.test_on_batch(X, X[:, :3], return_dict=True)["in_units"]
    assert before == pytest.approx(2 * np.abs(plain(X) - X[:, :3]).mean())
    scale.assign(4.0)
    model.reset_metrics()
    after = model.test_on_batch(X, X[:, :3], return_dict=True)["in_units"]
    assert after == pytest.approx(2 * before)


def test_a_pipelined_model_is_no_layer_of_another() -> None:
    model = PipelinedModel(two_outputs(), 2)
    with pytest.raises(errors.LayerError, match="cannot be a layer of a model"):
        model(keras.Input([6]))


@pytest.mark.parametrize("given", ["model.keras", keras.layers.Dense(3)])
def test_what_is_no_model_is_refused(given: Any) -> None:
    with pytest.raises(errors.LayerError, match=r"expected a keras.Model, got (str|Dense)\."):
        PipelinedModel(given, 2)


def test_a_penalty_by_a_lambda_is_no_matter_of_saving() -> None:
    x = keras.Input([6])
    penalized = keras.layers.Dense(3, kernel_regularizer=lambda w: keras.ops.sum(w**2))
    model = PipelinedModel(keras.Model(x, penalized(keras.layers.Dense(8)(x))), 2)
    model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.train_on_batch(X, X[:, :3])
    assert not [warning for warning in found if "lambda" in str(warning.message)]


@pytest.mark.usefixtures("float64")
def test_a_layer_of_texts_is_tried() -> None:
    x = keras.Input([1], dtype="string")
    hashed = keras.layers.Embedding(7, 3)(keras.layers.Hashing(7)(x))
    y = keras.layers.Dense(2)(keras.layers.Flatten()(hashed))
    model = PipelinedModel(keras.Model(x, y), 2, 2)
    model.compile("sgd", "mse")
    texts = tf.constant([["a"], ["b"], ["c"], ["d"]])
    assert np.isfinite(model.train_on_batch(texts, np.ones([4, 2])))


def test_the_first_call_of_a_class_does_not_decide_how_it_trains() -> None:
    plain = fit_cases.Defaulted()
    plain(X)
    twin = fit_cases.Defaulted()
    twin(X)
    twin.set_weights(plain.get_weights())
    model = PipelinedModel(plain, 2, 3)
    model(X, training=False)
    for each in (model, twin):
        each.compile("sgd", "mse")
        each.train_on_batch(X, X[:, :2])
    for one, other in zip(plain.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_class_whose_call_has_changed_is_refused_after_compile() -> None:
    class Phases(fit_cases.Defaulted):
        scale = 1.0

        def call(self, x: Any, training: bool = False) -> Any:
            return self.scale * super().call(x, training)

    plain = Phases()
    model = PipelinedModel(plain, 2, 3)
    for _ in range(2):
        model.compile("sgd", "mse")
        model.train_on_batch(X, X[:, :2])
    plain.scale = 3.0
    model.compile("sgd", "mse")
    with pytest.raises(errors.LayerError, match="does something else than when it was cut"):
        model.train_on_batch(X, X[:, :2])


@pytest.mark.parametrize("name", ["train_step", "compute_loss", "compute_metrics", "predict_step"])
def test_steps_of_the_models_own_are_refused(name: str) -> None:
    own = type("Own", (keras.Model,), {name: getattr(keras.Model, name), "__module__": "mine"})
    x = keras.Input([6])
    model = PipelinedModel(own(x, keras.layers.Dense(3)(keras.layers.Dense(8)(x))), 2)
    with pytest.raises(errors.LayerError, match=f"Own defines its own {name}"):
        model.compile("sgd", "mse")


@pytest.mark.parametrize("name", ["train_step", "compute_loss", "compute_metrics", "predict_step"])
def test_steps_of_a_class_of_pipelines_are_refused(name: str) -> None:
    own = type("Own", (PipelinedModel,), {name: getattr(keras.Model, name), "__module__": "mine"})
    with pytest.raises(errors.LayerError, match=f"Own defines its own {name}"):
        own(two_outputs(), 2).compile("sgd", "mse")


@pytest.mark.parametrize("inputs", [[X, X], [X]])
def test_a_sequential_without_a_graph_is_refused(inputs: list[Any]) -> None:
    class Shapeless(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x

        def compute_output_spec(self, x: Any) -> Any:
            raise NotImplementedError

    first = keras.layers.Concatenate() if len(inputs) > 1 else Shapeless()
    model = PipelinedModel(keras.Sequential([first, keras.layers.Dense(2)]), 2)
    model.compile("sgd", "mse")
    with pytest.raises(errors.LayerError, match=r"several inputs, or has a layer.*has no graph"):
        model.fit(inputs, X[:, :2], verbose=0)


@pytest.mark.parametrize("first", [[], [keras.Input([6])]])
def test_a_sequential_with_its_own_call_computes_that(first: list[Any]) -> None:
    class Own(keras.Sequential):
        def call(self, x: Any, training: bool | None = None, mask: Any = None) -> Any:
            return 2 * super().call(x, training, mask)

    plain = Own([*first, keras.layers.Dense(4), keras.layers.Dense(2)])
    expected = plain(X)
    model = PipelinedModel(plain, 2)
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, rtol=1e-5)


def test_a_sequential_takes_no_size_of_a_mini_batch() -> None:
    model = PipelinedModel(keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(2)]), 2)
    model.compile("sgd", "mse")
    model.train_on_batch(X, X[:, :2])
    assert (model.input_shape, model.output_shape) == ((None, 6), (None, 2))


def test_a_model_of_one_layer_needs_no_number_of_partitions() -> None:
    x = keras.Input([6])
    model = PipelinedModel(keras.Model(x, keras.layers.Dense(2)(x)))
    model.compile("sgd", "mse")
    model.train_on_batch(X, X[:, :2])
    assert model.settings["num_partitions"] == 1


def test_settings_of_compile_may_be_given_by_position() -> None:
    model = PipelinedModel(two_outputs(), 2)
    model.compile("sgd", "mse", None, None, None, False, 1, True)
    assert model.settings["jit_compile"] is True


def test_a_copy_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model = PipelinedModel(two_outputs(), 2)
    for copy_of in (
        keras.models.clone_model,
        copy.deepcopy,
        keras.Model.to_json,
        lambda model: keras.saving.save_model(model, tmp_path / "model.keras"),
    ):
        with pytest.raises(NotImplementedError, match="attribute model, the plain model"):
            copy_of(model)


def test_a_pipeline_in_a_pipeline_is_refused() -> None:
    with pytest.raises(errors.LayerError, match=r"is a PipelinedModel already.*give its \.model"):
        PipelinedModel(PipelinedModel(two_outputs(), 2), 2)


@pytest.mark.parametrize("method", ["fit", "evaluate"])
@pytest.mark.parametrize("penalty", [None, "l2"])
def test_data_without_labels_are_named(method: str, penalty: str | None) -> None:
    plain = two_outputs()
    plain.get_layer("hidden").kernel_regularizer = keras.regularizers.get(penalty)
    model = PipelinedModel(plain, 2)
    model.compile("adam", "mse")
    with pytest.raises(errors.InputError, match="the data has no labels y, with which the loss"):
        getattr(model, method)({"features": X}, verbose=0)


def test_a_missing_loss_is_named() -> None:
    model = PipelinedModel(two_outputs(), 2)
    model.compile("adam")
    with pytest.raises(errors.InputError, match="compile has no loss, and no layer adds one"):
        model.fit({"features": X}, LABELS, verbose=0)


def test_a_loss_is_not_tried_on_a_whole_mini_batch_of_large_outputs() -> None:
    """Logits of a language model are the largest tensors of a step: 13 GB on an accelerator."""
    computed = []
    examples, length, vocabulary = 16, 64, 20_000

    def loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        if tf.executing_eagerly():
            computed.append(tuple(logits.shape))
        return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)

    inputs = keras.Input([length], dtype="int32")
    embedded = keras.layers.Embedding(50, 4, mask_zero=True)(inputs)
    plain = keras.Model(inputs, keras.layers.Dense(vocabulary)(embedded))
    ids = np.random.default_rng(0).integers(0, 50, [examples, length])
    model = PipelinedModel(plain, 2, 8)
    model.compile("sgd", loss)
    plain.compile("sgd", loss)
    expected = plain.test_on_batch(ids, ids)
    np.testing.assert_allclose(model.train_on_batch(ids, ids), expected, rtol=1e-5)
    assert set(computed) == {
        (1, 32, vocabulary),
        (2, 32, vocabulary),
        (4, 32, vocabulary),
        (7, 32, vocabulary),
    }


def test_a_loss_that_needs_every_position_of_large_outputs_is_tried_on_all() -> None:
    position = tf.reshape(tf.range(64.0), [64, 1])

    def late(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(logits - labels) * position, axis=[1, 2])

    inputs = keras.Input([64, 2])
    plain = keras.Model(inputs, keras.layers.Dense(20_000)(keras.layers.Dense(2)(inputs)))
    x = np.random.default_rng(0).normal(size=[4, 64, 2]).astype("float32")
    labels = np.ones([4, 64, 1], "float32")
    model = PipelinedModel(plain, 2, 2)
    for each in (model, plain):
        each.compile("sgd", late)
    expected = plain.test_on_batch(x, labels)
    np.testing.assert_allclose(model.train_on_batch(x, labels), expected, rtol=1e-5)


def kept_mean(is_kept: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a mean over the labels that are kept; micro-batches do not know how many these are."""

    def loss(labels: Any, outputs: Any) -> Any:
        kept = is_kept(labels)
        errors = keras.ops.where(kept, labels - outputs, keras.ops.zeros_like(outputs))
        count = keras.ops.sum(keras.ops.cast(kept, outputs.dtype))
        return keras.ops.sum(errors**2) / keras.ops.maximum(count, 1)

    return loss


@pytest.mark.parametrize(
    ("is_kept", "left_out"),
    [
        (lambda labels: labels != 0, False),
        (lambda labels: labels != -1, False),
        (lambda labels: labels != -1, True),
        (lambda labels: labels >= 0, False),
        (lambda labels: labels != 255, False),
        (lambda labels: labels != -999, False),
        (lambda labels: ~keras.ops.isclose(labels, -9999.0), False),
        (lambda labels: labels < 5000, False),
        (lambda labels: labels == 1, False),
        (lambda labels: ~keras.ops.isnan(labels), False),
        (lambda labels: ~keras.ops.isnan(labels), True),
    ],
)
def test_a_mean_over_the_labels_that_are_kept_needs_one_micro_batch(
    is_kept: Callable[[Any], Any], left_out: bool
) -> None:
    labels = np.abs(X[:, :3]) + 1
    if left_out:  # in the first mini-batch
        labels[5] = np.where(is_kept(np.full([3], np.nan)), -1, np.nan)
    x = keras.Input([6])
    plain = keras.Model(x, keras.layers.Dense(3)(keras.layers.Dense(8)(x)))
    model = PipelinedModel(plain, 2, 3)
    model.compile("sgd", kept_mean(is_kept))
    with pytest.raises(errors.LayerError, match=r"is not a sum|a count of some labels"):
        model.train_on_batch(X, labels)
    model = PipelinedModel(plain, 2, 1)
    for each in (model, plain):
        each.compile(keras.optimizers.SGD(0.0), kept_mean(is_kept))
    expected = plain.train_on_batch(X, labels)
    np.testing.assert_allclose(model.train_on_batch(X, labels), expected, rtol=1e-5)


def test_a_label_that_is_no_number_reaches_the_loss() -> None:
    labels = X[:, :3].copy()
    labels[0] = np.nan
    x = keras.Input([6])
    model = keras.Model(x, keras.layers.Dense(3)(keras.layers.Dense(8)(x)))
    model = PipelinedModel(model, 2, 3)
    model.compile("sgd", "mse")
    assert np.isnan(model.train_on_batch(X, labels))


def test_a_loss_is_tried_where_it_is_finite() -> None:
    def above_one(labels: Any, outputs: Any) -> Any:
        return keras.ops.sum((labels - keras.ops.sqrt(outputs - 1)) ** 2, axis=-1)

    def never(labels: Any, outputs: Any) -> Any:
        return above_one(labels, outputs - 100)

    x = keras.Input([6])
    model = keras.Model(x, keras.layers.Dense(3)(keras.layers.Dense(8)(x)) ** 2 + 2)
    model = PipelinedModel(model, 2, 3)
    model.compile("sgd", above_one)
    assert np.isfinite(model.train_on_batch(X, X[:, :3]))
    model.compile("sgd", never)
    with pytest.raises(errors.LayerError, match="the loss 'never' is not finite on the outputs"):
        model.train_on_batch(X, X[:, :3])


class Last(keras.metrics.Mean):
    """A user's own class of metric, which keeps more than sums."""

    def update_state(self, labels: Any, outputs: Any, sample_weight: Any = None) -> None:
        del sample_weight
        self.reset_state()
        super().update_state(keras.ops.abs(labels - outputs))


def largest(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Return a number of the mini-batch that is no mean over its examples."""
    return tf.reduce_max(tf.abs(labels - outputs))


@pytest.mark.parametrize(
    ("metrics", "weighted", "by_micro_batch"),
    [
        (lambda: ["mae", keras.metrics.BinaryAccuracy()], False, True),
        (lambda: ["mae", keras.metrics.BinaryAccuracy()], True, True),
        (
            lambda: [keras.metrics.AUC(name="auc"), keras.metrics.F1Score(threshold=0.5)],
            False,
            True,
        ),
        (lambda: [keras.metrics.AUC(name="auc")], True, True),
        (lambda: [keras.metrics.BinaryIoU(name="iou"), keras.metrics.R2Score()], False, True),
        (lambda: ["mae", largest], False, False),
        (lambda: [Last(name="last")], False, False),
        (lambda: [Last(name="last")], True, False),
    ],
)
def test_metrics_that_are_sums_need_no_outputs_of_a_mini_batch(
    metrics: Callable[[], list[Any]],
    weighted: bool,
    by_micro_batch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    run = PipeliningLayer.value_and_gradients

    def recorded(*arguments: Any, outputs: bool, **settings: Any) -> Any:
        asked.append(outputs)
        return run(*arguments, outputs=outputs, **settings)

    monkeypatch.setattr(PipeliningLayer, "value_and_gradients", recorded)
    inputs = keras.Input([6])
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    plain = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    labels = (X[:, :1] > 0).astype("float32")
    weights = np.linspace(0.5, 2, len(X)) if weighted else None
    results = []
    for model in (PipelinedModel(plain, 2, 4), plain):
        kind = {"weighted_metrics" if weighted else "metrics": metrics()}
        model.compile(keras.optimizers.SGD(0.0), "mse", **kind)
        model.reset_metrics()
        for rows in (slice(0, 7), slice(7, 12)):
            row_weights = None if weights is None else weights[rows]
            result = model.train_on_batch(X[rows], labels[rows], row_weights, return_dict=True)
        results.append(result)
    assert asked == [not by_micro_batch] * 2
    for name, expected in results[1].items():
        np.testing.assert_allclose(results[0][name], expected, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_cells_are_compiled_where_keras_would_compile_the_model(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PipelinedModel(two_outputs(), 2)
    device = tf.config.PhysicalDevice(f"/physical_device:{kind}:0", kind)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: [device])
    model.compile("adam", "mse")
    assert model.settings["jit_compile"] is (kind == "GPU")
    model = PipelinedModel(two_outputs(), 2)
    model.compile("adam", "mse", jit_compile=False)
    assert model.settings["jit_compile"] is False


def test_one_metric_of_two_outputs_counts_both() -> None:
    plain = two_outputs()
    results = []
    for model in (PipelinedModel(plain, 2, 3), plain):
        missed = keras.metrics.FalseNegatives(name="missed")
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics={"price": missed, "kind": missed})
        results.append(model.evaluate({"features": X}, LABELS, 6, return_dict=True, verbose=0))
    for name, expected in results[1].items():
        np.testing.assert_allclose(results[0][name], expected, rtol=1e-5, err_msg=name)
