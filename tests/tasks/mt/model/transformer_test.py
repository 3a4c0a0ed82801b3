"""The translation model: counts, wiring, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, network, pipelining
from lingvo_gpipe.plan import describe
from lingvo_gpipe.tasks.mt.model import transformer
from tests.tasks.mt import toy_model
from tests.tasks.mt.toy_model import transformer_layers


def fields(batch: int = 4, **more: Any) -> dict[str, Any]:
    source, target = 7, 6

    def ids(*shape: int) -> tf.TensorSpec:
        return tf.TensorSpec(shape, tf.int32)

    found = {
        "source": ids(batch, source),
        "target": ids(batch, target),
        "label": ids(batch, target),
        "weight": tf.TensorSpec((batch, target)),
        "language": ids(batch),
    }
    for side, span in (("source", source), ("target", target)):
        for kind in ("segment", "position"):
            found[f"{side}_{kind}"] = ids(batch, span)
    return found | more


def model(layers: list[Any], **settings: Any) -> Any:
    return pipelining.PipeliningLayer.Params(layers=layers, **settings)


def parameters(layers: list[Any], **settings: Any) -> int:
    return describe.counts(network.analyze(model(layers, **settings), fields())).parameters


@pytest.mark.parametrize(("tie", "tables"), [(None, 3), ("softmax", 2), ("all", 1)])
def test_ties_save_tables(tie: Any, tables: int) -> None:
    layers = transformer_layers(6, 8192, 16, 64_000, tie=tie)
    assert parameters(layers, num_partitions=4) == 473_745_920 - (3 - tables) * 64_000 * 1024


@pytest.mark.parametrize("num_layers", [1, 5])
@pytest.mark.parametrize(
    ("transparent", "form"), [("shared", lambda n: n + 1), ("per_layer", lambda n: n * (n + 1))]
)
def test_transparent_attention_adds_its_shares_alone(
    num_layers: int, transparent: Any, form: Any
) -> None:
    plain = transformer_layers(num_layers, 32, 2, 50)
    mixed = transformer_layers(num_layers, 32, 2, 50, transparent=transparent)
    assert parameters(mixed) - parameters(plain) == form(num_layers)


def test_each_layer_writes_its_own_name_and_reads_what_it_needs() -> None:
    wired = {p.name: (p.reads, p.writes) for p in transformer_layers(2, 32, 2, 50)}
    own = ("target", "source")
    assert wired == {
        "source_embedding": (("source",), ("source_embedding",)),
        "encoder_0": (("source_embedding", "source"), ("encoder_0",)),
        "encoder_1": (("encoder_0", "source"), ("encoder_1",)),
        "encoder_norm": (("encoder_1",), ("encoder_norm",)),
        "target_embedding": (("target",), ("target_embedding",)),
        "decoder_0": (("target_embedding", "encoder_norm", *own), ("decoder_0",)),
        "decoder_1": (("decoder_0", "encoder_norm", *own), ("decoder_1",)),
        "decoder_norm": (("decoder_1",), ("decoder_norm",)),
        "softmax": (("decoder_norm", "label", "weight"), ("softmax",)),
    }


def test_encoder_output_goes_directly_to_the_cells_that_read_it() -> None:
    """The cell of the target embedding alone, between encoder and decoder, does not see it."""
    layers = transformer_layers(2, 32, 2, 50)
    analysis = network.analyze(model(layers, num_partitions=4, cuts=(4, 1, 2, 2)), fields())
    imports = [
        {analysis.wiring.versions[v].name for v in route.imports} for route in analysis.cells
    ]
    assert imports == [
        {"source"},
        {"target"},
        {"target_embedding", "encoder_norm", "target", "source"},
        {"decoder_1", "label", "weight"},
    ]


@pytest.mark.parametrize(
    ("transparent", "imports"),
    [
        ("shared", {"encoder_norm"}),
        ("per_layer", {"source_embedding", "encoder_0", "encoder_1", "encoder_2"}),
    ],
)
def test_transparent_attention_sends_what_decoders_mix(transparent: Any, imports: set[str]) -> None:
    layers = transformer_layers(3, 32, 2, 50, transparent=transparent)
    decoder = next(i for i, p in enumerate(layers) if p.name == "decoder_1")
    cuts = (decoder, len(layers) - decoder)
    analysis = network.analyze(model(layers, num_partitions=2, cuts=cuts), fields())
    found = {analysis.wiring.versions[v].name for v in analysis.cells[1].imports}
    assert found == imports | {"decoder_0", "target", "source", "label", "weight"}


def test_feed_forward_parts_begin_smaller_by_the_root_of_the_number_of_layers() -> None:
    for num_layers, given, expected in ((2, None, 0.5), (8, None, 0.25), (8, 0.125, 0.125)):
        layers = transformer_layers(num_layers, 64, 2, 50, units=32, ff_init_scale=given)
        pipe = model(layers).instantiate()
        pipe.build(fields())
        for path, variable in pipe.by_path.items():
            if path.endswith("kernel") and "/" in path and "embedding" not in path:
                *_, rows, columns = variable.shape
                xavier = (6.0 / (rows + columns)) ** 0.5
                factor = expected if "feed_forward" in path else 1.0
                if path != "softmax/kernel":
                    largest = float(tf.reduce_max(tf.abs(variable)))
                    assert 0.95 * factor * xavier < largest <= factor * xavier, path


def test_embeddings_and_softmax_begin_with_the_root_of_the_width() -> None:
    layers = transformer_layers(1, 64, 2, 2000, units=64)
    pipe = model(layers).instantiate()
    pipe.build(fields())
    for path in (
        "source_embedding/embedding/table",
        "target_embedding/embedding/table",
        "softmax/kernel",
    ):
        assert float(tf.math.reduce_std(pipe.by_path[path])) == pytest.approx(0.125, rel=0.02)


def test_the_vocabulary_of_the_data_flows_into_the_model() -> None:
    layers = transformer_layers(1, 32, 2, 64_000, tie="softmax")
    transformer.set_vocabulary(layers, 70)
    assert parameters(layers) == parameters(transformer_layers(1, 32, 2, 70, tie="softmax"))


def test_the_languages_of_the_data_are_counted_apart() -> None:
    layers = transformer_layers(1, 32, 2, 50)
    names = {"accuracy", "log_perplexity"}
    assert set(network.analyze(model(layers), fields()).metrics) == names
    transformer.set_languages(layers, ["de:en", "fr:en"])
    names |= {"language_accuracy", "language_log_perplexity"}
    assert set(network.analyze(model(layers), fields()).metrics) == names
    transformer.set_languages(layers, [])
    assert layers[-1].reads == ("decoder_norm", "label", "weight")


@pytest.mark.parametrize("tie", [None, "softmax", "all"])
@pytest.mark.parametrize("slices", [3, (20, 30)], ids=str)
def test_slices_of_the_vocabulary_hold_the_same_parameters(slices: Any, tie: Any) -> None:
    flat = transformer_layers(1, 32, 2, 50, tie=tie)
    by_name = {"*_embedding": slices, "softmax": slices}
    assert parameters(flat, slices=by_name) == parameters(flat)
    count = slices if isinstance(slices, int) else len(slices)
    assert len(network.layer_params(model(flat, slices=by_name))) == len(flat) + 3 * count
    transformer.set_vocabulary(flat, 70)
    if isinstance(slices, int):
        assert parameters(flat, slices=by_name) == parameters(flat)
    else:
        text = (
            "source_embedding (TokenEmbedding): slices (20, 30) add up to 50, but vocabulary=70. "
            "Change a size, or set slices=2 for equal ones"
        )
        with pytest.raises(errors.LayerError) as caught:
            parameters(flat, slices=by_name)
        assert str(caught.value) == text


def test_a_model_in_slices_has_the_metrics_of_the_whole_one() -> None:
    """Those by language too, in evaluation, where no logits are clipped."""
    settings = {"tie": "all", "transparent": "shared", "packed": True}
    settings |= {"languages": ("de:en", "fr:en"), "logit_clip": 0.1}
    batch = toy_model.fields(toy_model.TARGET) | {"language": tf.constant([1, 0, 1])}
    whole = toy_model.params(**settings).instantiate()
    whole.build(batch)
    toy_model.disturb(whole.by_path)
    slices = {"*_embedding": 4, "softmax": 4}
    sliced = toy_model.in_slices(whole, toy_model.params(slices, **settings), batch)
    one, other = (pipe.evaluate(batch) for pipe in (whole, sliced))
    assert set(one.sums) == set(other.sums) >= {"language_accuracy", "language_log_perplexity"}
    for found, wanted in zip(
        tf.nest.flatten((other.losses, other.sums)),
        tf.nest.flatten((one.losses, one.sums)),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("transparent", [None, "shared", "per_layer"])
def test_slices_of_feed_forward_parts_hold_the_same_parameters(transparent: Any) -> None:
    flat = transformer_layers(2, 32, 2, 50, transparent=transparent, packed=True)
    slices = {"*coder_?": (10, 22)}
    assert parameters(flat, slices=slices) == parameters(flat)
    assert len(network.layer_params(model(flat, slices=slices))) == len(flat) + 4 * 3


def test_a_model_trained_on_packed_rows_is_served_plain_ones() -> None:
    flat: list[Any] = transformer_layers(1, 32, 2, 50, packed=True, languages=["de:en"])
    available = {"source", "target"}
    served = []
    for params in flat:
        own = params.inference()
        assert set(own.reads) <= available
        available.update(own.writes)
        served.append(own)
    plain = transformer_layers(1, 32, 2, 50)
    plain[-1].reads = plain[-1].reads[:1]
    assert served == plain
    fed = {name: spec for name, spec in fields().items() if name in ("source", "target")}
    before, after = (
        network.analyze(model(layers), given).variables.keys()
        for layers, given in ((flat, fields()), (served, fed))
    )
    assert before == after


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(errors.LayerError, match=r"num_layers=0\. Use 1 or more"):
        transformer_layers(0, 32, 2, 50)
