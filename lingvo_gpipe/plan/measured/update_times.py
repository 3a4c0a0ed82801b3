"""The time of an update, measured on this machine by the very programs that training runs.

All devices update their weights at the same time, after they have added up the norm of the
gradient. So as many devices as compute at once here update weights together: those that own most.
A step is one call of a graph, to which all variables are passed, and so is this update.
"""

from __future__ import annotations

import collections
import functools
import statistics
import time
from collections.abc import Mapping, Sequence

import tensorflow as tf

from lingvo_gpipe import network, optim, packing
from lingvo_gpipe.execution import outer_function
from lingvo_gpipe.layers import base
from lingvo_gpipe.plan.measured.cell_runner import Clock, devices_at_once, fits_host

_WARM_UP, _RUNS = 2, 5


def measure(
    update: optim.Updater.Params,
    params: network.PipelineParams,
    analysis: network.Analysis,
    clock: Clock = time.perf_counter,
) -> float | None:
    """Return the seconds of an update of all weights, the call of a step included.

    Args:
        update: optimizer, clipping, averages and the rest of an update.
        params: params of the network, with all replicas.
        analysis: analysis of the network of one replica.
        clock: returns seconds.

    Returns:
        None where there is nothing to train, where weights and slots of the devices that update at
        once may need more than half of the host's memory, or where a device has too little for it.
    """
    places = _places(analysis, params.num_replicas, devices_at_once(params))
    specs = {path: analysis.variables[path] for path in places}
    # Groups, which need not be among these weights, set rates and cost nothing.
    update = update.copy()
    update.optimizer.groups = ()
    if not places or not fits_host(_bytes(update, specs)):
        return None
    try:
        return _Update(update, specs, places, analysis).median_s(clock)
    except tf.errors.ResourceExhaustedError:
        return None


def _places(
    analysis: network.Analysis, num_replicas: int, devices: Sequence[str]
) -> dict[str, str]:
    """Return path → name of a device here, for weights of the devices that own most."""
    owners = analysis.owners(num_replicas)
    trained = {path for cell in analysis.cells for path in cell.weights}
    of_device: dict[tuple[int, int], list[str]] = collections.defaultdict(list)
    for path in analysis.variables:
        if path in trained:
            device = analysis.cells[analysis.owner_cell(path)].device_number
            of_device[owners[path], device].append(path)

    def size(paths: Sequence[str]) -> int:
        return sum(analysis.variables[path].size_bytes for path in paths)

    heaviest = sorted(of_device.values(), key=size, reverse=True)
    return {path: name for name, paths in zip(devices, heaviest, strict=False) for path in paths}


def _bytes(update: optim.Updater.Params, specs: Mapping[str, base.VariableSpec]) -> int:
    """Return the bytes of weights, gradients, slots and averages, and of their new values."""
    optimizer: optim.Optimizer = update.optimizer.instantiate()
    slots = sum(slot.size_bytes for slot in optimizer.slots(specs.values()).values())
    weights = sum(spec.size_bytes for spec in specs.values())
    averages = weights if update.average is not None else 0
    return weights + 2 * (weights + slots + averages)


class _Update:
    """Weights of zeros on devices of this process, and their update by gradients of zeros."""

    def __init__(
        self,
        update: optim.Updater.Params,
        specs: Mapping[str, base.VariableSpec],
        places: Mapping[str, str],
        analysis: network.Analysis,
    ) -> None:
        """Make weights, slots and averages.

        Args:
            update: params of the update.
            specs: path → the weight.
            places: path → device.
            analysis: analysis of the network.
        """
        wanted = {
            path: packing.Wanted(
                tuple(spec.shape),
                spec.dtype,
                places[path],
                "weight",
                functools.partial(tf.zeros, spec.shape, spec.dtype),
            )
            for path, spec in specs.items()
        }
        self._updater = optim.Updater(
            update,
            variables=packing.create(wanted),
            specs=specs,
            device_of=places.__getitem__,
            layer_of=analysis.layer_of,
        )
        self._gradients = {}
        for path, spec in specs.items():
            with tf.device(places[path]):
                self._gradients[path] = tf.zeros(spec.shape, spec.dtype)

    def median_s(self, clock: Clock) -> float:
        """Return the median seconds of a call that does an update."""

        def update(gradients: Mapping[str, tf.Tensor]) -> tf.Tensor:
            return self._updater.apply(gradients, step=tf.constant(0))["gradient_norm"]

        function = outer_function.OuterFunction(update, assigns=True)
        seconds = []
        for _ in range(_WARM_UP + _RUNS):
            begun_s = clock()
            function(self._gradients).numpy()
            seconds.append(clock() - begun_s)
        return statistics.median(seconds[_WARM_UP:])
