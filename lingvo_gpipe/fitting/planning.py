"""What a pipeline sets by itself before it trains: a schedule (auto), and what fits in memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import context as tf_context

from lingvo_gpipe import errors, network, schedule
from lingvo_gpipe.console import units
from lingvo_gpipe.execution import micro_batch_dependence
from lingvo_gpipe.fitting import variables
from lingvo_gpipe.nests import SpecNest
from lingvo_gpipe.network import micro_batches
from lingvo_gpipe.plan import auto, step_plan

_CHOSEN = ("schedule", "cells_per_device", "recompute", "num_micro_batches")
WITHIN = ("device_memory", "slots_per_weight")
"""Fields by which a network is cut within the memory of its devices."""
_SHARE_OF_GPU = 0.85  # an H200 counted 0.8 to 1.2 times what plans say (docs/measurements.md)
_MORE_PARTITIONS = 4  # times K, up to which a number that fits is looked for


def settle(
    params: network.PipelineParams,
    fields: Mapping[str, SpecNest],
    slots: Callable[[], Mapping[str, int]],
    *,
    adapts: bool,
    divides: bool,
) -> dict[str, Any]:
    """Plan a step, and return what changes of its params.

    Args:
        params: of the network with its losses; `schedule` may be auto.
        fields: a mini-batch, name → nest of `tf.TensorSpec`.
        slots: returns path → bytes of the variables that the optimizer keeps for a weight.
        adapts: whether a step that does not fit changes so that it does. Else a `device_memory`
            that is too small is refused, and for the memory of a GPU there is a warning, because a
            plan is an estimate.
        divides: whether a mini-batch may have another number of micro-batches.

    Returns:
        Field → value of what differs from `params`.

    Raises:
        PartitionError: no such step fits; the message says which would.
    """
    limit_bytes = _limit_bytes(params)
    if limit_bytes is None and params.schedule != schedule.AUTO:
        return {}
    of_optimizer = slots()
    planner = _Planner(fields, of_optimizer, divides=divides)
    asked = params.copy()
    if limit_bytes is not None:
        trained = network.analyze(network.uncut(params), fields).variables
        sizes = [spec.size_bytes for path, spec in trained.items() if path in of_optimizer]
        asked.slots_per_weight = sum(of_optimizer.values()) / max(1, sum(sizes))
        asked.device_memory = f"{limit_bytes}B"
    if asked.schedule == schedule.AUTO:
        with contextlib.suppress(errors.PartitionError):  # nothing fits: below is why
            counts, _ = auto.counts(asked, fields) if divides else ([None], "")
            best = auto.choose_for(asked, planner, counts, limit_bytes).best
            return {field: best.model.get(field) for field in (*_CHOSEN, *WITHIN)}
        asked.schedule = "1f1b"
    if limit_bytes is None:
        return _changes(params, asked)
    fitting = planner.fitting(asked, limit_bytes)
    if fitting is not None:
        return _changes(params, fitting)
    changed = next(_fitting(asked, planner, limit_bytes), None)
    if changed is not None and adapts:
        size = units.size(limit_bytes)
        warnings.warn(f"{_text(changed)}, so that a step fits in {size}", stacklevel=2)
        return _changes(params, asked) | changed
    message = _refusal(asked, planner, limit_bytes, changed)
    if params.device_memory is not None:
        raise errors.PartitionError(message)
    warnings.warn(message, stacklevel=2)
    return _changes(params, asked.set(device_memory=None))


def slot_bytes(
    optimizer: keras.optimizers.Optimizer, trained: Mapping[str, keras.Variable]
) -> dict[str, int]:
    """Return the bytes that an optimizer keeps for each weight; none are allocated.

    Args:
        optimizer: of `compile`, built or not. Of one that has no whole config, two slots for each
            weight are assumed.
        trained: path → weight.
    """
    sizes = dict.fromkeys(trained, 0)
    try:
        copy = type(optimizer).from_config(optimizer.get_config())
    except (NotImplementedError, TypeError):  # a class of a user's own without a whole config
        return {path: 2 * _num_bytes(weight) for path, weight in trained.items()}
    with tf.Graph().as_default():  # in which variables use no memory
        weights = [_like(weight) for weight in trained.values()]
        paths = dict(zip(map(id, weights), trained, strict=True))
        with variables.observed_slots(copy) as slots:
            copy.build(weights)
        for weight, slot in slots:
            sizes[paths[id(weight)]] += _num_bytes(slot)
    return sizes


class _Planner:
    """Plans steps of a network."""

    def __init__(
        self, fields: Mapping[str, SpecNest], slots: Mapping[str, int], *, divides: bool
    ) -> None:
        self.fields = fields
        self.divides = divides
        self._cache = step_plan.PlanCache(slots)

    def __call__(self, model: network.PipelineParams, *, profile: bool = False) -> step_plan.Plan:
        """See `auto.Planner`."""
        return step_plan.make(model, self.fields, profile=profile, cache=self._cache)

    def kept(self, model: network.PipelineParams) -> str | None:
        """Return why the number of micro-batches stays; None: it may rise."""
        if not self.divides:
            return "a loss of compile is not a sum over examples"
        analysis = network.analyze(network.uncut(model), self.fields)
        return micro_batch_dependence.reason(analysis)

    def fitting(
        self, model: network.PipelineParams, limit_bytes: int
    ) -> network.PipelineParams | None:
        """Return params whose step needs no more than this on each device; None: there are none.

        The cut of equal times is tried first, then one within `device_memory`.
        """
        for tried in (model.copy().set(device_memory=None), model):
            # A schedule given as text has its own numbers of devices and micro-batches.
            with contextlib.suppress(errors.PartitionError, errors.ScheduleError):
                if self(tried).heaviest_bytes <= limit_bytes:
                    return tried
        return None


def _limit_bytes(params: network.PipelineParams) -> int | None:
    """Return the stated memory of a device, or a share of that of the smallest GPU; None: neither.

    A GPU's allocator gives out chunks that may be larger than what is asked for.
    """
    if params.device_memory is not None:
        return units.parse_size(params.device_memory)
    if params.placement not in ("auto", "gpu") or not tf.config.list_physical_devices("GPU"):
        return None
    sizes = {name: size for name, size in memory_bytes().items() if ":GPU:" in name}
    return int(_SHARE_OF_GPU * min(sizes.values()))


def memory_bytes() -> dict[str, int]:
    """Return device → the memory that TensorFlow may use there, as it has begun."""
    context = tf_context.context()
    context.ensure_initialized()
    devices = pywrap_tfe.TFE_ContextListDevices(context._context_handle)
    try:
        return {
            pywrap_tf_session.TF_DeviceListName(
                devices, number
            ): pywrap_tf_session.TF_DeviceListMemoryBytes(devices, number)
            for number in range(pywrap_tf_session.TF_DeviceListCount(devices))
        }
    finally:
        pywrap_tf_session.TF_DeleteDeviceList(devices)


def _fitting(
    asked: network.PipelineParams, planner: _Planner, limit_bytes: int
) -> Iterator[dict[str, Any]]:
    """Yield changes with which a step fits: first those with few more micro-batches."""
    counts = [asked.num_micro_batches]
    num_examples = micro_batches.batch_size(planner.fields)
    is_free = planner.kept(asked) is None and asked.schedule in schedule.SCHEDULES
    while is_free and counts[-1] < num_examples:
        counts.append(min(2 * counts[-1], num_examples))
    policies = [asked.recompute]
    if asked.recompute in auto.POLICIES:
        policies = [*auto.POLICIES[auto.POLICIES.index(asked.recompute) :]]
    for count in counts:
        for policy in policies:
            tried = asked.copy().set(num_micro_batches=count, recompute=policy)
            fitting = planner.fitting(tried, limit_bytes)
            if fitting is not None:
                yield _changes(asked, fitting)


def _refusal(
    asked: network.PipelineParams,
    planner: _Planner,
    limit_bytes: int,
    changed: Mapping[str, Any] | None,
) -> str:
    """Return what does not fit, and what would."""
    limit = f"{units.size(limit_bytes)} of a device"
    try:
        plain = asked.copy().set(device_memory=None)
        what = f"a step needs about {units.size(planner(plain).heaviest_bytes)}, more than the"
    except errors.PartitionError as error:
        what = f"{error}; there are"
    if changed is not None:
        return f"{what} {limit}. It fits with {_text(changed)}, which adapt_to_memory=True sets"
    most = min(_MORE_PARTITIONS * asked.num_partitions, len(asked.layers))
    own_cuts = {} if asked.cuts is None else {"cuts": None}
    for count in range(asked.num_partitions + (asked.cuts is None), most + 1):
        more = asked.copy().set(num_partitions=count, devices=None, cuts=None, recompute="full")
        fitting = next(_fitting(more, planner, limit_bytes), None)
        if fitting is not None:
            more_devices = {"num_partitions": count} if count > asked.num_partitions else {}
            return f"{what} {limit}. It fits with {_text({**more_devices, **own_cuts, **fitting})}"
    kept = planner.kept(asked)
    if kept is not None:
        return (
            f"{what} {limit}. Neither recompute='full' nor up to {most} partitions help. More "
            f"micro-batches are not tried, since they would change the results: {kept}"
        )
    examples = micro_batches.batch_size(planner.fields)
    return (
        f"{what} {limit}. Neither {examples} micro-batches with recompute='full' nor up to {most} "
        "partitions help: the largest layer alone may be too large. Make layers or mini-batches "
        "smaller"
    )


def _changes(before: network.PipelineParams, after: network.PipelineParams) -> dict[str, Any]:
    changed = {field: after.get(field) for field in (*_CHOSEN, *WITHIN)}
    return {field: value for field, value in changed.items() if value != before.get(field)}


def _text(changed: Mapping[str, Any]) -> str:
    shown = {field: value for field, value in changed.items() if field not in WITHIN}
    return ", ".join(f"{field}={value!r}" for field, value in shown.items())


def _like(weight: keras.Variable) -> keras.Variable:
    return keras.Variable("zeros", shape=weight.shape, dtype=weight.dtype, name=weight.name)


def _num_bytes(variable: keras.Variable) -> int:
    size: int = tf.TensorShape(variable.shape).num_elements()
    return size * tf.as_dtype(variable.dtype).size
