"""Keras models as layers: equal values layer by layer and through a pipeline."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from lingvo_gpipe import errors, hyperparams, network, pipelining
from lingvo_gpipe.keras_layers.model import Network, from_keras_model
from lingvo_gpipe.layers import base
from tests.lingvo_gpipe.keras_layers import whole_models
from tests.lingvo_gpipe.keras_layers.whole_models import pipeline

hyperparams.register_package(__name__)


def random(*shape: int, seed: int = 0, dtype: str = "float32") -> Any:
    return whole_models.random(*shape, seed=seed, dtype=dtype)


def same(model: keras.Model, *inputs: Any, **options: Any) -> Network:
    """Check that a cut model and the model return the same; return the cut."""
    cut = from_keras_model(model, **options)
    given = list(inputs) if len(inputs) > 1 else inputs[0]
    outputs, expected = pipeline(cut)(given), model(given, training=False)
    for ours, theirs in zip(*map(keras.tree.flatten, (outputs, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    again = hyperparams.Params
    for own in cut.layers:
        assert isinstance(own, again)
        assert own.from_text(own.to_text()) == own
    return cut


def residual() -> keras.Model:
    """Convolutions, batch norm, dropout, a skip and two consumers, like a small ResNet."""
    x = image = keras.Input((8, 8, 3), name="image")
    x = layers.Conv2D(6, 3, padding="same", name="stem")(x)
    for number in range(2):
        skip = x
        x = layers.BatchNormalization(momentum=0.7 + 0.1 * number, name=f"norm_{number}")(x)
        x = layers.Activation("gelu")(x)
        x = layers.Conv2D(6, 3, padding="same", use_bias=False)(x)
        x = layers.Dropout(0.25)(x)
        x = layers.Add()([x, skip])
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dense(5, activation="tanh")(x)
    return keras.Model(image, layers.Dense(4, name="logits")(x))


# --- Shapes of models -------------------------------------------------------------------------


def test_a_sequential_model_is_a_chain_of_its_layers() -> None:
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, activation="relu"), layers.Dense(3), layers.Softmax()]
    )
    cut = same(model, random(6, 4))
    assert [own.name for own in cut.layers] == ["dense", "dense_1", "softmax"]
    assert cut.inputs == "input_layer"
    assert cut.outputs == "softmax"


def test_names_do_not_depend_on_what_the_process_made_before() -> None:
    texts = []
    for _ in range(2):
        cut = from_keras_model(residual(), keep_weights=False)
        texts.append([own.to_text() for own in cut.layers])
    assert texts[0] == texts[1]
    assert [n.split("_")[0] for n in (own.name for own in cut.layers)][:3] == [
        "stem",
        "norm",
        "activation",
    ]


def test_a_text_has_what_a_normalisation_has_adapted_to() -> None:
    norm = layers.Normalization(name="norm")
    norm.adapt(3 + random(50, 4))
    field = keras.Input((4,))
    model = keras.Model(field, norm(field))
    (own,) = same(model, random(6, 4), keep_weights=False).layers
    assert isinstance(own, base.Layer.Params)
    pipe = pipelining.PipeliningLayer.Params(layers=[own.from_text(own.to_text())]).instantiate()
    x = random(6, 4, seed=1)
    np.testing.assert_allclose(pipe({own.reads[0]: x}), model(x), rtol=1e-5)


def test_without_its_weights_a_model_starts_from_the_seeds_of_the_pipeline() -> None:
    kernels = []
    for _ in range(2):
        cut = from_keras_model(residual(), keep_weights=False)
        built = pipeline(cut)
        built.build({cut.inputs: random(2, 8, 8, 3)})
        kernels.append({path: weight.numpy() for path, weight in built.weights.items()})
    for path, kernel in kernels[0].items():
        np.testing.assert_array_equal(kernel, kernels[1][path], err_msg=path)


def test_an_unbuilt_sequential_model_starts_from_its_initializers() -> None:
    model = keras.Sequential([layers.Dense(5), layers.BatchNormalization(), layers.Dense(3)])
    cut = from_keras_model(model)
    assert cut.inputs == "x"
    pipe = pipeline(cut)
    pipe.build({"x": random(6, 4)})
    ctx = pipe.context(training=True)
    assert pipe(random(6, 4), ctx=ctx).shape == (6, 3)
    assert set(pipe.merge_moments(ctx.collected.moments)) == {
        "batch_normalization/moving_mean",
        "batch_normalization/moving_variance",
    }


def test_several_inputs_and_outputs_keep_their_order() -> None:
    one, two = keras.Input((4,), name="one"), keras.Input((3,), name="two")
    joined = layers.Concatenate()([layers.Dense(4)(one), two])
    model = keras.Model([one, two], [layers.Dense(2, name="b")(joined), joined, one * 2.0])
    cut = same(model, random(5, 4), random(5, 3))
    assert cut.inputs == ["one", "two"]
    assert cut.outputs[0] == "b"
    renamed = from_keras_model(model, inputs={"two": "b_field"})
    assert renamed.inputs == ["one", "b_field"]
    with pytest.raises(errors.LayerError, match="no input 'on'; nearest 'one'"):
        from_keras_model(model, inputs={"on": "x"})


def test_operations_and_constants_of_the_graph_are_layers_too() -> None:
    x = keras.Input((6, 4))
    y = ops.reshape(x[:, 1:5, ...], (-1, 16)) @ np.ones((16, 3), "float32")
    y = ops.concatenate([y, ops.mean(x, axis=(1, 2), keepdims=False)[:, None]], axis=-1)
    model = keras.Model(x, y * np.array([1.0, 2.0, 3.0, 4.0], "float32") + 0.5)
    cut = same(model, random(5, 6, 4))
    assert len(cut.layers) == len(model.operations) - 1


class SumOf(layers.Layer):
    def call(self, values: Any) -> Any:
        return values["one"] + 2.0 * values["other"]


def test_a_dict_of_tensors_is_an_argument() -> None:
    x = keras.Input((4,), name="x")
    values = {"one": x, "other": layers.ReLU()(x)}
    cut = same(keras.Model(x, SumOf(name="sum")(values)), random(5, 4))
    assert cut.layers[-1].reads == ("x", "re_lu")


def test_an_automatic_name_that_a_user_has_given_is_changed() -> None:
    x = keras.Input((4,))
    cut = same(keras.Model(x, layers.Dense(3)(layers.ReLU(name="dense")(x))), random(5, 4))
    assert [own.name for own in cut.layers] == ["dense", "dense_"]


def test_a_layer_called_twice_owns_its_weights_once() -> None:
    shared = layers.Dense(4, kernel_regularizer="l2")
    one, two = keras.Input((4,)), keras.Input((4,))
    model = keras.Model([one, two], shared(shared(one)) - shared(two))
    cut = same(model, random(5, 4), random(5, 4, seed=1))
    dense = [own for own in cut.layers if own.name.startswith("dense")]
    assert [own.name for own in dense] == ["dense", "dense.2", "dense.3"]
    first = dense[0].name
    assert not dense[0].tie
    for own in dense[1:]:
        assert own.tie == {"kernel": f"{first}/kernel", "bias": f"{first}/bias"}
    params = network.PipelineParams(layers=cut.layers)
    analysis = network.analyze(params, {name: tf.TensorSpec((5, 4)) for name in cut.inputs})
    assert sorted(analysis.variables) == ["dense/bias", "dense/kernel"]
    assert [loss.name for loss in analysis.losses] == ["dense/regularization"]


def test_a_batch_norm_called_twice_is_refused_unless_frozen() -> None:
    norm = layers.BatchNormalization()
    x = keras.Input((4,))
    model = keras.Model(x, norm(norm(x)))
    with pytest.raises(errors.LayerError, match="is also called at an earlier node"):
        from_keras_model(model)
    norm.trainable = False
    same(model, random(5, 4))


def test_models_inside_a_model_are_cut_too() -> None:
    block = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.ReLU()], name="block")
    x = inner_input = keras.Input((4,))
    inner = keras.Model(inner_input, layers.Add()([block(x), x]), name="inner")
    y = keras.Input((4,))
    model = keras.Model(y, layers.Dense(2, name="top")(inner(inner(y))))
    cut = same(model, random(5, 4))
    assert [own.name for own in cut.layers] == [
        "inner.block.dense",
        "inner.block.re_lu",
        "inner.add",
        "inner.block.dense.2",
        "inner.block.re_lu.2",
        "inner.add.2",
        "top",
    ]
    assert cut.layers[3].tie["kernel"] == "inner.block.dense/kernel"


def test_masks_travel_by_names_that_somebody_reads() -> None:
    words = keras.Input((6,), dtype="int32", name="words")
    x = layers.Embedding(9, 4, mask_zero=True)(words)
    x = layers.Dropout(0.1)(x)
    y = layers.MultiHeadAttention(2, 3)(x, x)
    x = layers.LSTM(5, return_sequences=True)(layers.Add()([x, y]))
    x = layers.Bidirectional(layers.GRU(3))(x)
    model = keras.Model(words, layers.Dense(2)(x))
    whole_models.warm(model)
    batch = np.array([[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 8, 1], [2, 0, 0, 0, 0, 0]], "int32")
    cut = same(model, batch)
    assert not [own for own in cut.layers if "NotEqual" in str(own.get("config"))]
    written = {own.name: own.writes for own in cut.layers}
    assert written["embedding"] == ("embedding", "embedding.mask")
    assert written["bidirectional"] == ("bidirectional",)
    full = np.where(batch == 0, 1, batch)
    assert np.abs(pipeline(cut)(full) - model(batch)).max() > 1e-3


@pytest.mark.filterwarnings("ignore:Layer 'inner':UserWarning")
def test_a_mask_goes_through_an_inner_model_as_through_keras() -> None:
    x = inner_input = keras.Input((6, 4))
    x = layers.Dropout(0.1)(layers.LSTM(3, return_sequences=True)(x))
    inner = keras.Model(inner_input, x, name="inner")
    words = keras.Input((6,), dtype="int32", name="words")
    embedded = layers.Embedding(9, 4, mask_zero=True)(words)
    model = keras.Model(words, layers.GRU(2)(inner(embedded)))
    whole_models.warm(model)
    batch = np.array([[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 8, 1]], "int32")
    cut = same(model, batch)
    assert [own.name for own in cut.layers] == ["embedding", "inner.lstm", "inner.dropout", "gru"]
    assert cut.layers[2].writes == ("inner.dropout", "inner.dropout.mask")


def test_a_mask_given_by_hand_is_an_argument() -> None:
    x, mask = keras.Input((6, 4)), keras.Input((6,), dtype="bool", name="given")
    attended = layers.MultiHeadAttention(2, 3)(x, x, attention_mask=mask[:, None, :])
    model = keras.Model([x, mask], layers.LSTM(3)(attended, mask=mask))
    cut = same(model, random(3, 6, 4), random(3, 6, seed=2) > 0.2)
    assert cut.layers[-1].get("kwargs") == {"mask": {"read": "given"}}


def test_outputs_that_nobody_reads_are_left_out() -> None:
    x = keras.Input((5, 4))
    _, _, cell = layers.LSTM(3, return_state=True)(x)
    cut = same(keras.Model(x, layers.Dense(2)(cell)), random(2, 5, 4))
    assert cut.layers[0].writes == ("lstm:2",)
    assert cut.layers[0].get("picks") == (2,)


def test_frozen_layers_stay_frozen() -> None:
    model = residual()
    for layer in model.layers[:4]:
        layer.trainable = False
    cut = same(model, random(2, 8, 8, 3))
    params = network.PipelineParams(layers=cut.layers)
    analysis = network.analyze(params, {"image": tf.TensorSpec((2, 8, 8, 3))})
    trained = sorted(path for path, v in analysis.variables.items() if v.trainable)
    expected = {path.partition("/")[0] for path in trained}
    assert len(trained) == len(model.trainable_variables)
    assert "stem" not in expected
    assert "norm_0" not in expected


class Subclassed(keras.Model):
    def call(self, x: Any) -> Any:
        return x


def test_a_model_without_a_graph_is_refused() -> None:
    with pytest.raises(errors.LayerError, match=r"has no graph to cut\. Convert the whole model"):
        from_keras_model(Subclassed())
    with pytest.raises(errors.LayerError, match=r"expected a keras\.Model, got Dense\. For a sin"):
        from_keras_model(layers.Dense(3))
    unbuilt = keras.Sequential([layers.Embedding(5, 4, mask_zero=True), layers.LSTM(3)])
    with pytest.raises(errors.LayerError, match=r"returns a Keras mask.*Add a keras\.Input"):
        from_keras_model(unbuilt)


# --- Training: gradients, dropout, moving statistics ------------------------------------------


class Precise(layers.Layer):
    """Computes in the model's dtype, then in float32, and reads a float32 weight as it is."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.low = layers.Dense(8, dtype="mixed_bfloat16", use_bias=False)
        self.high = layers.Dense(3, dtype="float32")

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(3,), name="scale", initializer="ones", autocast=False)
        self.low.build(shape)
        self.high.build((*shape[:-1], 8))

    def call(self, x: Any) -> Any:
        return self.high(self.low(x)) * self.scale


def test_sublayers_of_another_dtype_read_weights_that_are_not_rounded() -> None:
    live = keras.Sequential([keras.Input((5,)), Precise(name="own", dtype="mixed_bfloat16")])
    for number, variable in enumerate(live.weights):
        variable.assign(random(*variable.shape, seed=number))
    x, target = random(6, 5), random(6, 3, seed=1)
    with tf.GradientTape() as tape:
        outputs = live(x)
        loss = tf.reduce_mean(tf.reduce_sum((outputs - target) ** 2, -1))
    wanted = dict(zip(("own/scale", "own/low/kernel"), live.weights[:2], strict=True))
    wanted |= {f"own/high/{v.name}": v for v in live.layers[-1].high.weights}
    gradients = dict(zip(wanted, tape.gradient(loss, list(wanted.values())), strict=True))
    cut = from_keras_model(live)
    compute = {
        v.path: v.compute for v in cut.layers[-1].fprop_meta(tf.TensorSpec([6, 5])).variables
    }
    assert [path for path, dtype in compute.items() if dtype == tf.bfloat16] == ["low/kernel"]
    pipe = pipeline(cut)
    pipe.build({cut.inputs: x})
    with tf.GradientTape() as tape:
        own = pipe(x, training=True)
        loss = tf.reduce_mean(tf.reduce_sum((own - target) ** 2, -1))
    np.testing.assert_array_equal(own, outputs)
    found = dict(zip(pipe.weights, tape.gradient(loss, list(pipe.weights.values())), strict=True))
    assert found.keys() == gradients.keys()
    for path, gradient in gradients.items():
        np.testing.assert_allclose(found[path], gradient, rtol=1e-6, atol=1e-6, err_msg=path)


@pytest.mark.sameness_grid
def test_resnet50_is_cut_layer_by_layer() -> None:
    model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=4)
    assert len(same(model, random(3, 32, 32, 3)).layers) == 176


def test_a_normalization_keeps_what_it_has_adapted_to() -> None:
    x = 3.0 * random(8, 6, 6, 3) + 1.0
    norm = layers.Normalization()
    norm.adapt(x)
    for first in (norm, layers.Normalization()):  # adapted; built alone, which is 0 and 1
        model = keras.Sequential([keras.Input((6, 6, 3)), first, layers.Conv2D(4, 3)])
        same(model, x)


def applications() -> list[str]:
    """Return the names of all models of `keras.applications`."""
    names = [name for name in dir(keras.applications) if name[0].isupper()]
    return [name for name in names if callable(getattr(keras.applications, name))]


@pytest.mark.parametrize(
    "name",
    [
        name if name == "MobileNet" else pytest.param(name, marks=pytest.mark.sameness_grid)
        for name in applications()
    ],
)
def test_every_model_of_keras_applications_is_cut(name: str) -> None:
    make = getattr(keras.applications, name)
    try:
        model = make(weights=None, input_shape=(96, 96, 3), classes=5)
    except ValueError:  # of one size alone
        model = make(weights=None)
    cut = from_keras_model(model, keep_weights=False)
    spec = tf.TensorSpec([4, *model.inputs[0].shape[1:]], tf.float32)
    params = pipelining.PipeliningLayer.Params(
        layers=cut.layers, outputs=cut.outputs, num_partitions=2, num_micro_batches=2
    )
    analysis = network.analyze(params, {cut.inputs: spec})
    (version,) = analysis.wiring.outputs.values()
    assert tuple(analysis.specs[version].shape) == (2, *model.outputs[0].shape[1:])
    trained = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    ours = [v for v in analysis.variables.values() if v.is_trained]
    assert sum(int(np.prod(v.shape)) for v in ours) == trained
    keras.backend.clear_session()


# --- Through the pipeline ---------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("sizes", "num_partitions", "schedule"),
    [((6,), 1, "gpipe"), ((3, 2), 1, "gpipe"), ((3, 2), 2, "1f1b"), ((3, 2), 3, "gpipe")],
)
def test_a_small_model_in_a_pipeline_is_the_model(
    sizes: tuple[int, ...], num_partitions: int, schedule: str
) -> None:
    model = residual()
    whole_models.warm(model)
    images = random(sum(sizes), 8, 8, 3, dtype="float64")
    whole_models.check(
        model,
        [images],
        sizes=sizes,
        num_partitions=num_partitions,
        schedule=schedule,
        tolerance=1e-12,
    )


@pytest.mark.usefixtures("float64")
def test_the_first_stage_of_resnet50_in_a_pipeline_is_resnet50s() -> None:
    whole = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=4)
    features = whole.get_layer("conv2_block1_out").output
    pooled = keras.layers.GlobalAveragePooling2D()(features)
    model = keras.Model(whole.input, keras.layers.Dense(4)(pooled))
    whole_models.check(
        model, [random(6, 32, 32, 3, dtype="float64")], num_partitions=3, sizes=(3, 3)
    )
