"""A plan names the layers that are larger than a device, and the fewest slices that fit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lingvo_gpipe import errors, layers, optim, pipelining, task
from lingvo_gpipe.console import units
from lingvo_gpipe.plan import report, slicing, step_plan
from lingvo_gpipe.tasks.lm import transformer
from lingvo_gpipe.tasks.lm.input import Tokens
from lingvo_gpipe.tasks.mt.model import transformer as mt

MIB = 2**20


def language(memory: str | None, *, tie: bool = False, **model: Any) -> Any:
    """Return a language model of 20,000 ids whose softmax alone needs 25 MiB."""
    flat = transformer.language_model(2, units=32, heads=2, hidden=64, vocabulary=20_000)
    if tie:
        flat[-1].tie = {"kernel": "embedding/table"}
    rule = optim.RMSProp.Params(momentum=0.9)
    return task.Task.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=flat,
            **{"num_partitions": 6, "num_micro_batches": 8, "device_memory": memory, **model},
        ),
        input=Tokens.Params(batch_size=8, data_dir="missing", length=32),
        train=task.Train(
            optimizer=optim.Optimizer.Params(rule=rule, learning_rate=0.1), max_steps=1
        ),
    )


def refusal(params: Any) -> str:
    with pytest.raises(errors.PartitionError) as refused:
        report.plan(params)
    return str(refused.value)


def advised(text: str) -> str:
    """Return the override that a text suggests."""
    (found,) = re.findall(r'--params_override="(model\.slices=[^"]*)"', text)
    return str(found)


def fits(params: Any, slices: Any, limit_bytes: int) -> bool:
    sliced = params.copy()
    sliced.model.set(slices=slices, cuts=None)
    try:
        return step_plan.make_for(sliced).heaviest_bytes <= limit_bytes
    except errors.PartitionError:
        return False


@pytest.mark.parametrize("memory", ["6MiB", "9MiB", "12MiB", "20MiB"])
def test_the_fewest_slices_that_fit_are_advised(memory: str) -> None:
    """With the override the plan fits; with a slice less of any layer it does not."""
    params = language(memory)
    text = refusal(params)
    limit = units.parse_size(memory)
    needed = units.size(slicing.layer_bytes(params)["softmax"])
    assert text.startswith(
        f"layer softmax alone needs {needed} of a device of {units.size(limit)}. In slices"
    )
    found = params.copy()
    found.override(advised(text))
    slices = dict(found.model.slices)
    assert fits(params, slices, limit)
    planned = step_plan.make_for(found)
    assert f"the heaviest needs {units.size(planned.heaviest_bytes)}: " in text
    assert "every device stays within it" in report.plan(found)
    for name, number in slices.items():
        assert number == 2 or not fits(params, {**slices, name: number - 1}, limit)


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_a_layer_needs_what_a_cell_of_it_alone_does(num_replicas: int) -> None:
    """With replicas, of the one that owns most; of one micro-batch at a time."""
    params = language(None, num_partitions=5, cuts=(1,) * 5, num_replicas=num_replicas)
    params.model.num_micro_batches = num_replicas
    params.train.accumulate = num_replicas
    planned = step_plan.make_for(params)
    needs = slicing.layer_bytes(params)
    for cell in (planned.cells[0], planned.cells[-1]):  # the large ones
        assert needs[cell.layers[0]] == pytest.approx(cell.total_bytes, rel=0.15)
    assert slicing.advice(params, max(needs.values())) is None


def test_tied_layers_are_divided_alike() -> None:
    text = refusal(language("14MiB", tie=True))
    found = re.fullmatch(r"model\.slices={'embedding': (\d+), 'softmax': (\d+)}", advised(text))
    assert found is not None
    assert found[1] == found[2]


def test_blocks_alike_are_one_pattern() -> None:
    params = language("20MiB")
    params.model.layers = transformer.language_model(
        3, units=32, heads=2, hidden=20_000, vocabulary=50
    )
    params.model.num_partitions = 8
    text = refusal(params)
    assert re.fullmatch(r"model\.slices={'layer_\*': \d+}", advised(text))


def test_layers_of_a_translation_model_are_named() -> None:
    params = language("4MiB")
    sizes = mt.TranslationTransformer(
        num_layers=1, hidden=16, heads=2, vocabulary=9_000, units=16, head_dim=8, tie="all"
    )
    params.model.set(layers=mt.translation_transformer(sizes), num_partitions=10)
    params.input = Pairs.Params(batch_size=8, data_dir="missing", length=8)
    override = advised(refusal(params))
    assert re.fullmatch(
        r"model\.slices={'source_embedding': (\d), 'target_embedding': \1, "
        r"'softmax': \1}",
        override,
    )


def test_other_slices_of_the_task_stay() -> None:
    params = language("12MiB", slices={"layer_0": 2})
    assert advised(refusal(params)).endswith("'layer_0': 2}")


def test_the_memory_of_hosts_is_a_limit_too() -> None:
    params = language(None, num_partitions=4)
    text = report.plan(params, cluster="1x4,memory=12MiB")
    assert "layer softmax alone needs" in text
    assert text.count(" --params_override=model.device_memory=12582912") == 1
    found = language("12582912", num_partitions=4)
    found.override(advised(text))
    assert step_plan.make_for(found).heaviest_bytes <= 12 * MIB
    assert "alone needs" not in report.plan(params, cluster="1x4,memory=64MiB")
    params.model.set(cuts=(1, 2, 1, 1), costs=(1.0,) * 5)
    assert advised(report.plan(params, cluster="1x4,memory=12MiB")) == advised(text)


def test_too_few_devices_for_any_slices_are_reported() -> None:
    text = refusal(language("8MiB", num_partitions=1))
    assert text.endswith(
        "No number of slices was found with which all devices fit. Use more partitions, more "
        "micro-batches, or larger devices"
    )


def test_a_layer_that_cannot_be_divided_is_named() -> None:
    params = language("6MiB")
    wide = layers.Dense.Params(name="wide", units=20_000)
    narrow = layers.Dense.Params(name="narrow", units=32)
    first, *others = params.model.layers
    params.model.layers = [first, wide, narrow, *others]
    text = refusal(params)
    assert "wide, narrow cannot be divided into slices. Use fewer examples" in text


class Pairs(Tokens):
    """Sentences of a source and a target."""

    class Params(Tokens.Params):
        """Params of Pairs."""

    def example_spec(self) -> Any:
        fields = super().example_spec()
        return {"source": fields["target"], **fields}
