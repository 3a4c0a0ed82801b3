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
    softmax = {need.name: need for need in slicing.needs(params)}["softmax"]
    assert text.startswith(
        f"layer softmax alone needs {units.size(softmax.total_bytes)} of a device of "
        f"{units.size(limit)} (weights {units.size(softmax.weight_bytes)}, "
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


def test_a_layer_that_fits_is_not_advised() -> None:
    assert slicing.advice(language(None), 64 * MIB) is None
    assert "alone needs" not in report.plan(language("64MiB", num_partitions=4))


def test_a_need_is_that_of_a_cell_of_the_layer_alone() -> None:
    """With replicas, of the one that owns most; activations of other micro-batches left out."""
    for num_replicas in (1, 4):
        params = language(None, num_partitions=5, cuts=(1,) * 5, num_replicas=num_replicas)
        params.train.accumulate = num_replicas
        planned = step_plan.make_for(params)
        for need, cell in zip(slicing.needs(params), planned.cells, strict=True):
            assert (need.weight_bytes, need.gradient_bytes, need.slot_bytes) == (
                cell.parameter_bytes,
                cell.gradient_bytes,
                cell.slot_bytes,
            )
            assert need.step_bytes >= max(cell.update_bytes, cell.copy_bytes)
            assert need.total_bytes <= cell.total_bytes * 1.01


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
    assert "; too large are also layer_1, layer_2. In slices" in text


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


def test_slices_that_are_still_too_large_become_more() -> None:
    both = {"embedding": 2, "softmax": 2}
    whole, sliced = (language("9MiB", slices=slices) for slices in ({}, both))
    assert (
        advised(refusal(whole)).split("'softmax'")[1]
        == advised(refusal(sliced)).split("'softmax'")[1]
    )
    assert "layer softmax_0 alone needs" in refusal(sliced)


def test_the_memory_of_hosts_is_a_limit_too() -> None:
    params = language(None, num_partitions=4)
    text = report.plan(params, cluster="1x4,memory=12MiB")
    assert "layer softmax alone needs" in text
    assert text.count(" --params_override=model.device_memory=12582912") == 1
    found = language("12582912", num_partitions=4)
    found.override(advised(text))
    assert step_plan.make_for(found).heaviest_bytes <= 12 * MIB
    assert "alone needs" not in report.plan(params, cluster="1x4,memory=64MiB")


def test_cuts_that_are_stated_are_left_out() -> None:
    params = language(None, num_partitions=4, cuts=(1, 2, 1, 1), costs=(1.0,) * 5)
    text = report.plan(params, cluster="1x4,memory=12MiB")
    assert "--params_override=model.cuts=None --params_override=model.costs=None" in text
    found = language("12582912", num_partitions=4)
    found.override(advised(text))
    assert step_plan.make_for(found).heaviest_bytes <= 12 * MIB


def test_too_few_devices_for_any_slices_are_reported() -> None:
    text = refusal(language("8MiB", num_partitions=1))
    assert text.endswith(
        "No number of slices was found with which all devices fit. Use more partitions, more "
        "micro-batches, or larger devices"
    )


@pytest.mark.parametrize("above", [0.5, 0.98])
def test_a_block_whose_attention_alone_is_too_large_is_reported(
    monkeypatch: pytest.MonkeyPatch, above: float
) -> None:
    """More slices of its feed-forward part do not help, so not every number is tried."""
    params = language(None)
    params.input.length = 256
    params.model.layers = transformer.language_model(
        2, units=32, heads=2, hidden=1_000, vocabulary=50
    )
    sliced = slicing.with_slices(params, {"layer_*": 1_000})
    parts = [need for need in slicing.needs(sliced) if need.name.startswith("layer_")]
    floor = max(need.total_bytes for need in parts)
    asked: list[int] = []
    too_large = slicing._too_large

    def counted(*given: Any) -> Any:
        asked.append(1)
        return too_large(*given)

    monkeypatch.setattr(slicing, "_too_large", counted)
    found = slicing.advice(params, int(above * floor))
    assert found is not None
    assert found.slices is None
    assert len(asked) < 60


def test_the_last_number_of_slices_is_not_jumped_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 16 on numbers are raised by two, but 19 rows are 19 slices at most."""
    tried: list[list[int]] = []

    def too_large(task: Any, limit_bytes: int) -> tuple[Any, ...]:
        del limit_bytes
        numbers = list(task.model.slices.values())
        tried.append(numbers)
        if numbers[0] > 19:
            raise errors.LayerError("slices=20, but vocabulary=19")
        return () if numbers == [19] else (slicing.LayerNeed("softmax_0", 0, 0, 0, 100),)

    monkeypatch.setattr(slicing, "_too_large", too_large)
    monkeypatch.setattr(slicing, "_of_wholes", lambda *_: {"softmax": 100 - len(tried)})
    monkeypatch.setattr(slicing, "_heaviest", lambda *_: 50)
    group = slicing.Group(("softmax",), ("softmax",), 100, ())
    search = slicing._Search(language(None), 90, [group])
    assert search.first([16]) == ([19], 50)
    assert tried == [[16], [18], [20], [19]]


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
