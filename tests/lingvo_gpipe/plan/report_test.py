from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from lingvo_gpipe import errors, layers, optim
from lingvo_gpipe.console import units
from lingvo_gpipe.plan import largest, report, step_plan
from tests import tiny_task


def deep_task(depth: int, units: int = 4) -> Any:
    """Return the tiny task with `depth` hidden layers of `units` features."""
    task = tiny_task.tiny_task()
    head = task.model.layers[-1]
    task.model.layers = [
        layers.Dense.Params(name=f"hidden_{n}", units=units, reads=("point" if n == 0 else "x",))
        for n in range(depth)
    ] + [head]
    task.model.num_partitions = 1
    return task


def grown_task(depth: int) -> Any:
    """Return `deep_task` with a rule whose state is counted without an optimizer of Keras.

    A search makes hundreds of plans, and Keras makes variables for each.
    """
    task = deep_task(depth)
    task.train.optimizer = by_formula()
    return task


class Sixes(layers.Flatten):
    """A layer whose features are a multiple of six."""

    class Params(layers.Flatten.Params):
        """Params of Sixes."""

        def _meta(self, *inputs: Any) -> Any:
            if inputs[0].shape[-1] % 6:
                raise errors.LayerError("not a multiple of 6")
            return super()._meta(*inputs)


def by_formula() -> Any:
    rule = optim.Adafactor.Params(momentum=0.9, min_factored=4)
    return optim.Optimizer.Params(rule=rule, learning_rate=0.01)


def rebuild(name: str, value: int) -> Any:
    if name != "depth":
        raise errors.ParamsError(f"the recipe has no {name!r}")
    return grown_task(value)


def test_a_plan_of_several_cells_per_device_has_the_device_of_each() -> None:
    task = deep_task(7)
    task.model.set(num_partitions=2, schedule="interleaved", cells_per_device=3)
    given = step_plan.make_for(task)
    text = report.plan(task)
    rows = text.splitlines()
    assert "; K=2, V=3, " in rows[0]
    devices = {row.split()[0]: row.split()[1] for row in rows if re.match(r" +\d ", row)}
    assert devices == {str(k): str(k % 2) for k in range(6)}
    sizes = ", ".join(map(units.size, given.device_bytes))
    assert f"devices with all their cells, activations counted once: {sizes}" in rows
    assert max(map(len, rows)) <= 100


def test_the_cuts_of_many_cells_are_a_number_of_cells() -> None:
    for depth, layers_of_a_cell in ((20, "1 to 2 layers"), (17, "1 layer")):
        task = deep_task(depth)
        task.model.set(num_partitions=6, schedule="interleaved", cells_per_device=3)
        assert f"cuts: 18 cells of {layers_of_a_cell}" in report.plan(task).splitlines()


def test_names_of_layers_are_shown_in_full_however_wide_the_table() -> None:
    task = deep_task(40, units=3000)
    for number, layer in enumerate(task.model.layers[:-1]):
        layer.name = f"encoder_of_sentences_block_{number}"
    task.model.set(num_partitions=4, num_micro_batches=4)
    task.input.batch_size = 2048
    for dtype in (None, "mixed_bfloat16"):
        task.model.dtype = dtype
        text = report.plan(task)
        first, *_, last = step_plan.make_for(task).cells[1].layers
        assert f"{first} … {last}" in text
        assert ("copies" in text) == (dtype is not None)
        assert max(map(len, text.splitlines())) <= 100


def test_a_devices_memory_is_reported_with_what_the_cut_really_needs() -> None:
    task = tiny_task.tiny_task()
    assert "device_memory" not in report.plan(task)
    task.model.device_memory = "1MiB"
    assert "device_memory 1MiB: every device stays within it" in report.plan(task)
    heaviest = step_plan.make_for(task).heaviest_bytes
    task.model.set(device_memory=str(heaviest - 100), cuts=(1, 3))
    assert "the heaviest device needs 100 B more than that" in report.plan(task)
    # --fit names the memory itself.
    task.model.cuts = None
    task.train.optimizer = by_formula()
    assert "largest input.batch_size" in report.plan(task, fit="64KiB", grow="input.batch_size")


def test_all_devices_together_are_reported() -> None:
    given = step_plan.make_for(tiny_task.tiny_task())
    together = units.size(given.together_bytes)
    assert f"at most {together} at once" in report.plan(tiny_task.tiny_task())
    apart = [cell.total_bytes for cell in given.cells]
    assert max(apart) < given.together_bytes <= sum(apart)


def test_activations_are_marked_where_they_are_by_formula() -> None:
    assert "estimate by formula" in report.plan(tiny_task.tiny_task())
    traced = step_plan.make_for(tiny_task.tiny_task(), profile=True)
    text = report.render(traced)
    assert "peak activations: traced programs" in text
    assert "estimate" not in text
    assert "~" not in text
    one, other = traced.cells
    looped = dataclasses.replace(traced, cells=(one, dataclasses.replace(other, is_estimate=True)))
    text = report.render(looped)
    assert "traced programs, ~ where loops count by formula" in text
    assert f"~{units.size(other.activation_bytes)}" in text
    assert text.count("~") == 2
    assert max(map(len, text.splitlines())) <= 100


def test_an_update_that_needs_more_than_the_step_is_a_column() -> None:
    text = report.plan(deep_task(2, units=512))
    head, *rows = (re.split(r"  +", line.strip()) for line in text.splitlines()[4:6])
    assert head[3:8] == ["weights", "gradients", "optimizer", "~activations", "or update"]
    assert "or update" not in report.plan(tiny_task.tiny_task())
    cell = step_plan.make_for(deep_task(2, units=512)).cells[0]
    kept = cell.parameter_bytes + cell.gradient_bytes + cell.slot_bytes
    assert cell.total_bytes == kept + cell.update_bytes
    assert rows[0][7] == units.size(cell.update_bytes)


def test_what_was_measured_can_be_given_to_training() -> None:
    task = tiny_task.tiny_task()
    text = report.plan(task, profile=True)
    assert re.search(r"of the step of \S+ s$", text, re.MULTILINE)
    assert re.search(
        r"^call of the step, and update where devices own most weights: \S+ s$", text, re.MULTILINE
    )
    (cuts,) = re.findall(r"--params_override='(model\.cuts=.*)'$", text, re.MULTILINE)
    task.override(cuts)
    assert task.model.cuts == step_plan.make_for(task).analysis.cuts
    assert "params_override" not in report.plan(task, profile=True)


def test_another_number_of_partitions_forgets_cuts_made_for_the_old_one() -> None:
    task = tiny_task.tiny_task()
    task.model.set(cuts=(1, 3), device_speeds=(1.0, 2.0))
    assert "cuts: (1, 3)" in report.plan(task)
    assert "K=4" in report.plan(task, partitions=4)
    task.model.recompute = "full,never"
    with pytest.raises(
        errors.ParamsError, match=r"cells of num_partitions=2, not of 4\. Set one policy"
    ):
        report.plan(task, partitions=4)


# Odd and even values, so that a search that ends one step too early is found.
@pytest.mark.parametrize("limit", [2**13, 2**13 + 2**9, 2**14, 2**16])
def test_the_largest_that_fits_fits_and_one_more_does_not(limit: int) -> None:
    found = largest.find(grown_task, 1, limit)
    assert found.value is not None
    assert found.plan is not None
    assert found.plan.heaviest_bytes <= limit
    assert step_plan.make_for(grown_task(found.value + 1)).heaviest_bytes > limit
    assert len(found.plan.analysis.layers) == found.value + 1


def test_values_that_are_refused_end_no_search() -> None:
    """Each replica needs a micro-batch of the mini-batch of eight examples."""
    task = grown_task(2)
    task.model.num_micro_batches = 2
    found = largest.find(largest.family(task, "model.num_replicas"), 1, 2**40)
    assert (found.value, found.is_largest) == (2, True)
    task.model.set(num_replicas=9)
    with pytest.raises(errors.ParamsError, match=r"^--grow=model.seed: num_replicas=9, but a"):
        report.plan(task, partitions=1, fit="1GiB", grow="model.seed")


def test_growth_ends_at_very_many_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "_MOST_LAYERS", 4)
    found = largest.find(grown_task, 1, 2**40)
    assert (found.value, found.is_largest) == (4, False)


def test_devices_that_share_a_memory_hold_less() -> None:
    limit = 2**16
    apart, together = (
        largest.find(grown_task, 4, limit, together=shared) for shared in (False, True)
    )
    assert together.plan is not None
    assert together.plan.together_bytes <= limit
    assert (together.value or 0) < (apart.value or 0)
    above = largest.with_partitions(grown_task((together.value or 0) + 1), 4)
    assert step_plan.make_for(above).together_bytes > limit


def replicated(num_replicas: int) -> Any:
    """Return a task of equal layers that divide alike over replicas, or partitions."""
    task = deep_task(7, units=64)
    task.model.set(num_partitions=2, num_micro_batches=8, num_replicas=num_replicas)
    return task


def test_a_plan_of_replicas_has_the_bytes_of_its_devices_and_what_they_send() -> None:
    given = step_plan.make_for(replicated(2))
    text = report.plan(replicated(2))
    least, most = units.size(min(given.device_bytes)), units.size(given.heaviest_bytes)
    assert least != most
    assert f"a device needs {least} to {most}\n" in text
    sent = units.size(given.exchange.sent_bytes)
    assert f"\neach replica sends {sent} of weights and gradients a step, on average\n" in text


def test_the_largest_with_replicas_counts_the_weights_of_all_owners() -> None:
    two = replicated(2)
    two.train.optimizer = by_formula()
    text = report.plan(two, fit="8MiB", grow="model.layers[3].units", partitions=2)
    assert text.startswith(
        "largest model.layers[3].units whose every device stays within 8.00 MiB, R=2"
    )
    row = text.splitlines()[3].split("  ")
    value = int(next(cell for cell in row[1:] if cell.strip()).strip())
    two.model.layers[3].units = value
    variables = step_plan.make_for(two).analysis.variables.values()
    assert units.size(sum(spec.size_bytes for spec in variables)) in [cell.strip() for cell in row]


@pytest.mark.parametrize("kib", [40, 56, 64])
def test_a_field_of_the_task_grows_by_its_path(kib: int) -> None:
    text = report.plan(grown_task(3), fit=f"{kib}KiB", grow="model.layers[1].units")
    member = largest.family(grown_task(3), "model.layers[1].units")
    assert "K=8: num_partitions=8, but there are 4 layers" in text
    found = {int(k): int(value) for k, value in re.findall(r"^ *(\d) +(\d+) ", text, re.MULTILINE)}
    assert list(found) == [1, 2, 4]
    for k, value in found.items():
        fits, above = (
            step_plan.make_for(largest.with_partitions(member(value + more), k)) for more in (0, 1)
        )
        assert fits.heaviest_bytes <= kib * 1024 < above.heaviest_bytes


def test_values_that_the_model_refuses_are_passed_over() -> None:
    task = grown_task(1)
    first, head = task.model.layers
    task.model.layers = [first, Sixes.Params(name="sixes"), head]
    found = largest.find(largest.family(task, "model.layers[0].units"), 1, 2**15)
    assert found.value is not None
    assert found.value % 6 == 0


def test_what_never_fits_is_said() -> None:
    text = report.plan(grown_task(3), fit="100B", grow="depth", rebuild=rebuild, partitions=1)
    assert "none fits" in text
    found = largest.find(grown_task, 1, 100)
    assert (found.value, found.num_partitions) == (None, 1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"fit": "8GiB"}, "--fit needs --grow=FIELD"),
        ({"grow": "model.seed"}, "--grow needs --fit=8GiB"),
        ({"fit": "8 giraffes", "grow": "model.seed"}, "'8 giraffes' is not a size"),
        ({"fit": "8GiB", "grow": "train.max_step"}, "nearest 'train.max_steps'"),
        ({"fit": "8GiB", "grow": "model.schedule"}, "'gpipe' is not an integer"),
        ({"fit": "8GiB", "grow": "width", "rebuild": rebuild}, "no 'width'"),
        ({"fit": "8GiB", "grow": "depth", "profile": True}, "Leave one of the two out"),
    ],
)
def test_a_wrong_question_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.UserError) as caught:
        report.plan(deep_task(2), **fields)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("8GiB", 2**33), ("1.5 KiB", 1536), ("16gb", 16 * 10**9), ("2 B", 2)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "8XB", "1" * 40])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(errors.ParamsError, match="is not a size"):
        units.parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1023.6 * 1024, "1.00 MiB"),
        (10 * 2**30, "10.0 GiB"),
    ],
)
def test_sizes_are_shown_with_three_digits(size: float, text: str) -> None:
    assert units.size(size) == text
