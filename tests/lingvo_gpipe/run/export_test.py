"""Export: only the plain network, equal for every cut, run by TensorFlow alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, layers, network, optim, pipelining, task
from lingvo_gpipe.input.serving import Serving
from lingvo_gpipe.keras_layers.model import from_keras_model
from lingvo_gpipe.layers import composite
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.run import checkpoints, export, loop
from lingvo_gpipe.tasks.image import SklearnDigits
from lingvo_gpipe.tasks.image.model import convnet
from tests import sliced_task
from tests.support import programs, saved

NAMES = tuple(f"digit {n}" for n in range(10))


class ServedDigits(SklearnDigits):
    """Digits that are served from the bytes of grey PNG files."""

    @property
    def class_names(self) -> tuple[str, ...]:
        return NAMES

    def serving(self) -> Any:
        def image(encoded: tf.Tensor) -> tf.Tensor:
            pixels = tf.io.decode_image(encoded, 1, expand_animations=False)
            return tf.ensure_shape(tf.cast(pixels, tf.float32) / 16.0, [8, 8, 1])

        def fields(given: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            spec = tf.TensorSpec([8, 8, 1])
            return {"image": tf.map_fn(image, given["image_bytes"], fn_output_signature=spec)}

        return Serving({"image_bytes": tf.TensorSpec([None], tf.string)}, fields)


def digits_task(flat: list[Any], **model: Any) -> Any:
    return task.Task.Params(
        model=pipelining.PipeliningLayer.Params(layers=flat, **model),
        input=ServedDigits.Params(batch_size=16, eval_batch_size=100),
        train=task.Train(
            optimizer=optim.Optimizer.Params(name="Adam", learning_rate=1e-3),
            average=optim.Average.Params(decay=0.5),
            max_steps=3,
        ),
    )


def conv_net() -> list[Any]:
    return convnet.conv_net([[4], [6]], classes=10, dense_units=8, dropout=0.3)


def png(images: Any) -> tf.Tensor:
    return tf.stack([tf.io.encode_png(tf.cast(tf.round(x * 16), tf.uint8)) for x in images])


def digits() -> Any:
    batches = ServedDigits.Params(batch_size=40).instantiate().evaluation("test")
    return next(iter(batches))["image"]


def check_outputs(loaded: Any, params: Any, folder: Path, **logits: str) -> None:
    """Compare the probabilities that a model serves with evaluation's logits, by their names."""
    images = digits()
    batch = {"image": images, "label": tf.zeros(len(images), tf.int32)}
    evaluated = saved.restored(params, folder).evaluate(batch, outputs=True).outputs
    served = loaded.signatures["serving_default"](image_bytes=png(images))
    assert set(served) == set(logits)
    for name, output in logits.items():
        wanted = tf.nn.softmax(evaluated[output])
        np.testing.assert_allclose(served[name], wanted, rtol=1e-5, atol=1e-7)


def nodes(concrete: Any) -> list[Any]:
    """Return the nodes of a graph and of every function in it."""
    graph = concrete.graph.as_graph_def()
    return [*graph.node, *(node for own in graph.library.function for node in own.node_def)]


def computed(concrete: Any) -> list[Any]:
    """Return what a graph computes: its nodes, without the numbers that functions are given."""
    return sorted(
        (
            node.op,
            node.name,
            tuple(node.input),
            tuple(
                (key, value.SerializeToString())
                for key, value in sorted(node.attr.items())
                if not value.HasField("func") and not key.startswith("_")
            ),
        )
        for node in nodes(concrete)
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a task of digits and its run's folder after three updates, with averages."""
    folder = tmp_path_factory.mktemp("trained")
    params = digits_task(conv_net(), num_partitions=2, num_micro_batches=4, schedule="1f1b")
    loop.run(params, folder)
    return params, folder


def test_the_exported_model_returns_the_probabilities_of_evaluation(
    trained: tuple[Any, Path],
) -> None:
    params, folder = trained
    lines: list[str] = []
    assert export.run(params, folder, report=lines.append) == folder / "export" / "3"
    assert lines == [
        f"exported step=3 to {folder}/export/3",
        "    serving_default: image_bytes string[N] → probabilities float32[N, 10]; "
        "classes: 10 names",
    ]
    loaded = tf.saved_model.load(str(folder / "export" / "3"))
    check_outputs(loaded, params, folder, probabilities="x")
    assert [n.decode() for n in loaded.signatures["classes"]()["classes"].numpy()] == list(NAMES)


def test_tensorflow_alone_serves_it(trained: tuple[Any, Path], tmp_path: Path) -> None:
    params, folder = trained
    own = export.run(params, folder)
    images = digits()[:3]
    wanted = tf.saved_model.load(str(own)).signatures["serving_default"](image_bytes=png(images))
    np.save(tmp_path / "png.npy", png(images).numpy())
    program = f"""
import json
import numpy as np
import tensorflow as tf
model = tf.saved_model.load({str(own)!r})
given = tf.constant(np.load({str(tmp_path / "png.npy")!r}, allow_pickle=True))
probabilities = model.signatures["serving_default"](image_bytes=given)["probabilities"]
print(json.dumps([probabilities.numpy().tolist(), "lingvo_gpipe" in sys.modules]))
"""
    out = programs.output(programs.hiding("lingvo_gpipe", "sklearn", "matplotlib") + program)
    probabilities, imported = json.loads(out.splitlines()[-1])
    np.testing.assert_allclose(probabilities, wanted["probabilities"], rtol=1e-6)
    assert not imported


def test_cuts_schedule_and_devices_leave_no_trace(tmp_path: Path) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"num_partitions": 2, "num_micro_batches": 4, "devices": ("CPU:3", "CPU:2")},
        {"num_partitions": 3, "num_micro_batches": 2, "schedule": "1f1b", "recompute": "never"},
    ]
    first = digits_task(conv_net())
    loop.run(first, tmp_path)
    found = []
    for way in ways:
        params = digits_task(conv_net(), **way)
        folder = export.run(params, tmp_path)
        loaded = tf.saved_model.load(str(folder))
        served = loaded.signatures["serving_default"]
        assert {node.device for node in nodes(served)} == {""}
        found.append((computed(served), {v.name: v.numpy() for v in served.variables}))
        assert len(served.variables) > 6
        text = (folder / "saved_model.pb").read_bytes()
        assert b"lingvo" not in text
        # TensorFlow's own saving and restoring functions run on the host.
        assert set(re.findall(rb"CPU:.", text)) <= {b"CPU:0", b"CPU:*"}
        assert str(Path(__file__).parents[3]).encode() not in text
    for graph, values in found[1:]:
        assert graph == found[0][0]
        assert all(np.array_equal(values[name], value) for name, value in found[0][1].items())


def test_variables_are_weights_and_statistics_and_nothing_of_training(
    trained: tuple[Any, Path],
) -> None:
    params, folder = trained
    loaded = tf.saved_model.load(str(export.run(params, folder)))
    paths = {v.name.removesuffix(":0").replace(".", "/") for v in loaded.variables_by_path.values()}
    pipe = saved.restored(params, folder)
    assert paths == set(pipe.by_path)
    assert not any(v.trainable for v in loaded.variables_by_path.values())
    # Averages, not the weights, which differ from them after three updates.
    newest = checkpoints.find(str(folder / "checkpoints"))[-1]
    for path in ("head/kernel", "stage_1_1_norm/moving_mean"):
        average = checkpoints.read_value(newest, f"average/{path}")
        np.testing.assert_array_equal(loaded.variables_by_path[path], average)
        assert not np.array_equal(average, checkpoints.read_value(newest, f"variables/{path}"))


def test_a_second_export_takes_the_place_of_the_first(trained: tuple[Any, Path]) -> None:
    params, folder = trained
    own = export.run(params, folder)
    (own / "left").write_text("of the first")
    (folder / "export" / "3.writing").mkdir()
    (folder / "export" / "3.writing" / "half").write_text("cut off")
    assert export.run(params, folder) == own
    assert [path.name for path in (folder / "export").iterdir()] == ["3"]
    assert not (own / "left").exists()


def test_a_named_checkpoint_is_exported(trained: tuple[Any, Path], tmp_path: Path) -> None:
    params, folder = trained
    prefix = checkpoints.find(str(folder / "checkpoints"))[0]
    assert export.run(params, tmp_path, which=prefix) == tmp_path / "export" / "3"


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (
            OSError(28, "No space left on device"),
            errors.CheckpointError,
            "export/3 cannot be written: No space left",
        ),
        (KeyboardInterrupt("by hand"), KeyboardInterrupt, "by hand"),
    ],
)
def test_an_export_that_was_cut_off_or_cannot_be_renamed_leaves_what_was_there(
    trained: tuple[Any, Path],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    raised: type[BaseException],
    text: str,
) -> None:
    params, folder = trained
    own = export.run(params, folder)
    own.rename(own.with_name("3.before"))  # where a process was killed between two renames
    rename = Path.rename

    def full(path: Path, target: Path) -> Path:
        if path.name == "3.writing":
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(raised, match=text):
        export.run(params, folder)
    assert [path.name for path in (folder / "export").iterdir()] == ["3"]
    assert (own / "saved_model.pb").exists()


def test_keras_layers_are_served_as_tensorflows_operations(tmp_path: Path) -> None:
    model = keras.Sequential(
        [
            keras.layers.Conv2D(4, 3, activation="gelu"),
            keras.layers.BatchNormalization(),
            keras.layers.SpatialDropout2D(0.5),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )
    own = from_keras_model(model, keep_weights=False, inputs={"x": "image"})
    head = layers.Softmax.Params(name="head", classes=10, reads=("dense", "label"))
    params = digits_task([*own.layers, head], num_partitions=2)
    loop.run(params, tmp_path)
    folder = export.run(params, tmp_path)
    loaded = tf.saved_model.load(str(folder))
    assert {node.device for node in nodes(loaded.signatures["serving_default"])} == {""}
    check_outputs(loaded, params, tmp_path, probabilities="x")


# --- what inference leaves out --------------------------------------------------------------------


class Branching(layers.Composite):
    """x, label → x; an auxiliary head reads x and label only in training."""

    class Params(layers.Composite.Params):
        reads = ("x", "label")
        auxiliary: layers.Softmax.Params | None = hyperparams.field(None, "Its head.")
        body: layers.Dense.Params = hyperparams.required("What it computes.")

        def parts(self) -> dict[str, layers.Layer.Params]:
            head = {"auxiliary": self.auxiliary} if self.auxiliary is not None else {}
            return {"body": self.body, **head}

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            output = call("body", inputs[0])
            if "auxiliary" in call.parts:
                call("auxiliary", *inputs)
            return output

        def _inference(self) -> Self:
            served = self.copy()
            return served.set(auxiliary=None, reads=served.reads[:1])

    params: Params


def many() -> list[Any]:
    """Return a network with everything that only training needs."""
    return [
        layers.Flatten.Params(name="flat", reads=("image",)),
        layers.Dense.Params(name="aside", units=5, writes=("aside",)),
        layers.Softmax.Params(
            name="early",
            classes=10,
            reads=("aside", "label"),
            writes=("early",),
            loss_name="early",
            metric_prefix="early/",
        ),
        layers.AuxiliaryLoss.Params(name="small", coefficient=1e-3),
        Branching.Params(
            name="branch",
            body=layers.Dense.Params(units=12, activation="relu"),
            auxiliary=layers.Softmax.Params(
                classes=10, loss_name="side", metric_prefix="side/", training_only=True
            ),
        ),
        layers.Sequential.Params(
            name="top",
            reads=("x", "label"),
            layers=[layers.Softmax.Params(classes=10)],
        ),
        layers.KerasMetric.Params(
            name="auc", metric="SparseCategoricalCrossentropy", config={"from_logits": True}
        ),
    ]


def test_what_serves_training_alone_is_left_out(tmp_path: Path) -> None:
    params = digits_task(many(), num_partitions=2, outputs=("x", "early"))
    loop.run(params, tmp_path)
    loaded = tf.saved_model.load(str(export.run(params, tmp_path)))
    paths = {path.rsplit("/", 1)[0] for path in loaded.variables_by_path}
    assert paths == {"aside", "early", "branch/body", "top/softmax"}
    check_outputs(loaded, params, tmp_path, probabilities="x", early_probabilities="early")


def plain_names(flat: list[Any], **model: Any) -> list[str]:
    params = pipelining.PipeliningLayer.Params(layers=flat, **model)
    return [own.name for own in export.inference_params(params, ("image",)).params.layers]


def test_layers_that_no_output_needs_are_left_out() -> None:
    assert plain_names(many(), outputs=("x",)) == ["flat", "branch", "top"]
    assert plain_names(many(), outputs=("early",)) == ["flat", "aside", "early"]


def test_a_value_that_is_read_only_in_training_is_not_a_fault() -> None:
    flat = [
        layers.Identity.Params(name="two", reads=("image", "image"), writes=("x", "aside")),
        layers.Flatten.Params(name="flat"),
        layers.KerasMetric.Params(metric="Mean", reads=("aside", "label"), writes=("aside",)),
        layers.Softmax.Params(name="head", classes=10),
    ]
    own = export.inference_params(pipelining.PipeliningLayer.Params(layers=flat), ("image",))
    pipe = own.params.instantiate()
    outputs = pipe.evaluate({"image": tf.ones([2, 8, 8, 1])}, outputs=True).outputs
    assert [info.name for info in pipe.analysis.layers] == ["two", "flat", "head"]
    assert outputs["x"].shape == [2, 10]


def test_layers_out_of_training_keep_frozen_patterns_out_of_the_way() -> None:
    flat = [
        layers.Flatten.Params(name="flat", reads=("image",)),
        layers.Dense.Params(name="aside", units=5, writes=("aside",)),
        layers.Softmax.Params(name="head", classes=10),
    ]
    assert plain_names(flat, outputs=("x",), frozen=("aside/*",)) == ["flat", "head"]


@pytest.mark.parametrize("slices", [sliced_task.THREE, {"*": 2}], ids=["by name", "all"])
def test_a_network_in_slices_is_not_divided_again(slices: Any) -> None:
    model = sliced_task.task_of(sliced_task.THREE).model
    if slices != sliced_task.THREE:
        model.set(layers=[p for p in model.layers if p.name in ("embedding", "softmax")])
        model.slices = slices
    served = export.InferenceNetwork(model, {"target": tf.TensorSpec([None, 5], tf.int32)})
    fields = sliced_task.Ids.Params(batch_size=4).instantiate().element_spec(training=True)
    trained = network.analyze(model, fields).variables
    assert {path: tuple(v.shape) for path, v in served.by_path.items()} == {
        path: spec.shape for path, spec in trained.items()
    }


def test_a_field_may_be_an_output() -> None:
    flat = [
        layers.Flatten.Params(name="flat", reads=("image",)),
        layers.Softmax.Params(name="head", classes=10),
    ]
    model = pipelining.PipeliningLayer.Params(layers=flat, outputs=("image", "x"))
    served = export.InferenceNetwork(model, {"image": tf.TensorSpec([None, 8, 8, 1])})
    images = tf.random.stateless_normal([2, 8, 8, 1], seed=(1, 2))
    outputs = served({"image": images})
    assert set(outputs) == {"image", "probabilities"}
    np.testing.assert_array_equal(outputs["image"], images)


def test_an_input_serves_what_its_own_preprocessing_takes(tmp_path: Path) -> None:
    params = digits_task(conv_net())
    params.input = SklearnDigits.Params(batch_size=16)
    loop.run(params, tmp_path)
    served = tf.saved_model.load(str(export.run(params, tmp_path))).signatures
    told = served["serving_default"](image=digits()[:2])["probabilities"]
    np.testing.assert_allclose(tf.reduce_sum(told, -1), [1, 1], rtol=1e-6)
    assert served["classes"]()["classes"].shape == [10]


@pytest.mark.parametrize(
    ("flat", "text"),
    [
        (
            [layers.Dense.Params(name="one", units=3, reads=("label",)), *many()[-2:-1]],
            "the network cannot be exported: its output is 'x', but one (Dense) reads 'label', "
            "which is not served. Change the layer's `inference` so that it does not need it, or "
            "name other outputs in model.outputs",
        ),
        (
            [layers.Dense.Params(name="head", units=3, reads=("image",), training_only=True)],
            "the network cannot be exported: its output is 'x', but no layer of inference writes "
            "it. Change",
        ),
    ],
)
def test_an_output_that_needs_the_label_is_reported(flat: list[Any], text: str) -> None:
    with pytest.raises(errors.LayerError) as caught:
        export.inference_params(pipelining.PipeliningLayer.Params(layers=flat), ("image",))
    assert str(caught.value).startswith(text)
