"""What cells and replicas send each other: by hand, and its time on hosts."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import layers, network, pipelining
from lingvo_gpipe.network import host_order, traffic
from lingvo_gpipe.plan import hosts, step_plan

N, D = 512, 64


def skip_to_three(**fields: Any) -> network.Analysis:
    """Return four cells on two devices; the last three read what the first writes."""
    first = layers.Dense.Params(name="first", units=D, writes=("skip",))
    others = [
        layers.Dense.Params(name=f"d{n}", units=D, reads=("skip",), writes=(f"y{n}",))
        for n in range(3)
    ]
    end = layers.Concat.Params(name="end", reads=("y0", "y1", "y2"))
    params = pipelining.PipeliningLayer.Params(
        layers=[first, *others, end, layers.MeanSquaredError.Params()],
        num_partitions=2,
        cuts=(1, 1, 1, 3),
        schedule="0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0",
        **fields,
    )
    specs = {"x": tf.TensorSpec([N, D]), "target": tf.TensorSpec([N, 3 * D])}
    return network.analyze(params, specs)


def test_cells_of_one_device_send_each_other_nothing_and_receive_once() -> None:
    analysis = skip_to_three()
    found = traffic.links(analysis)
    one = N * D * 4
    assert found == (
        traffic.Link(traffic.INPUT, 0, one, 0, ("x",)),
        traffic.Link(traffic.INPUT, 3, 3 * one, 0, ("target",)),
        traffic.Link(0, 1, one, one, ("skip",)),
        # Its value is there; the gradient of each cell comes back by itself.
        traffic.Link(0, 3, 0, one, ("skip",)),
        traffic.Link(2, 3, one, one, ("y1",)),
    )


def test_a_value_that_is_there_and_needs_no_gradient_is_no_link() -> None:
    analysis = skip_to_three(frozen=("first/*",))
    found = traffic.links(analysis)
    of_first = [link for link in found if link.source == 0]
    assert of_first == [traffic.Link(0, 1, N * D * 4, 0, ("skip",))]


# --- replicas -------------------------------------------------------------------------------------

FIELDS = {"x": tf.TensorSpec([8, 4]), "y": tf.TensorSpec([8, 4])}


def params(num_replicas: int, **changes: Any) -> network.PipelineParams:
    found: network.PipelineParams = pipelining.PipeliningLayer.Params(
        layers=[
            *(layers.Dense.Params(units=4) for _ in range(4)),
            layers.MeanSquaredError.Params(reads=("x", "y")),
        ],
        cuts=(2, 3),
        num_partitions=2,
        num_micro_batches=4,
        num_replicas=num_replicas,
    ).set(**changes)
    return found


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_a_replica_sends_its_share_of_weights_and_gradients(num_replicas: int) -> None:
    sent = step_plan.make(params(num_replicas), FIELDS).exchange
    size = 4 * 4 * (16 + 4)  # four layers in float32
    for one in (*sent.weights, *sent.gradients):
        assert one.source // 2 != one.target // 2
        assert one.source % 2 == one.target % 2
    for kind in (sent.weights, sent.gradients):
        assert sum(one.size for one in kind) == (num_replicas - 1) * size
    assert sent.sent_bytes == 2 * (num_replicas - 1) * size // num_replicas


def test_weights_travel_in_the_compute_dtype_and_gradients_in_that_of_the_variables() -> None:
    sent = step_plan.make(params(2, dtype="mixed_bfloat16"), FIELDS).exchange
    weights = sum(one.size for one in sent.weights)
    assert 2 * weights == sum(one.size for one in sent.gradients)


def test_a_tied_weight_goes_to_both_cells_of_another_replica() -> None:
    tied = params(2)
    tied.layers[3].set(name="last", tie={"kernel": "first/kernel"})
    tied.layers[0].set(name="first")
    analysis = network.analyze(tied.copy().set(num_replicas=1), FIELDS)
    owners = dict.fromkeys(analysis.variables, 1)
    sent = traffic.exchange(analysis, owners, 2)
    # From device 2, that of the first cell of replica 1: kernel and biases, and the tied kernel.
    found = {(one.source, one.target): one.size for one in sent.weights}
    assert found == {(2, 0): 2 * 80, (2, 1): 64, (3, 1): 80 + 16}
    found = {(one.source, one.target): one.size for one in sent.gradients}
    assert found == {(0, 2): 2 * 80, (1, 3): 80 + 16}


def test_devices_of_a_host_share_its_connection() -> None:
    sent = step_plan.make(params(2), FIELDS).exchange
    # One host for each replica, and one for each device.
    shared, apart, together = (
        hosts.exchange_times(
            hosts.parse(shape), host_order.replica_by_replica(hosts.parse(shape).place(4)), sent
        )
        for shape in ("2x2,between=1kB", "4x1,between=1kB", "1x4,between=1kB,within=1kB")
    )
    assert shared.weights_s == pytest.approx([0.16, 0.16])
    assert apart.weights_s == apart.gradients_s == pytest.approx([0.08, 0.08])
    assert together.weights_s == pytest.approx([0.08, 0.08])


def test_an_owner_that_sends_to_several_devices_of_its_host_sends_one_after_another() -> None:
    one_layer = params(3, cuts=None, num_partitions=1, num_micro_batches=3)
    one_layer.layers = one_layer.layers[3:]
    sent = step_plan.make(one_layer, FIELDS).exchange
    shape = hosts.parse("1x3,within=1kB")
    times = hosts.exchange_times(shape, host_order.replica_by_replica(shape.place(3)), sent)
    # One replica owns the kernel of 64 bytes, another one the bias of 16.
    assert times.weights_s == times.gradients_s == pytest.approx([2 * 0.064])


def test_a_measured_step_ends_when_gradients_have_arrived() -> None:
    free = step_plan.make(params(2), FIELDS, profile=True)
    slow = step_plan.make(params(2), FIELDS, profile=True, cluster=hosts.parse("4x1,between=100B"))
    assert free.step_s == free.timeline.makespan_s
    # 80 bytes of weights before the first slot of a cell, and as many of gradients at the end.
    rest_s = slow.step_s - slow.timeline.makespan_s
    assert 1.6 - 1e-9 <= rest_s < 1.6 + 0.5 * slow.timeline.makespan_s


def test_with_the_speed_of_devices_a_plan_is_in_seconds() -> None:
    flops = step_plan.make(params(2), FIELDS)
    known = hosts.parse("4x1,between=100B,flops=2.5k")
    timed = step_plan.make(params(2), FIELDS, cluster=known)
    assert not flops.in_seconds
    assert timed.in_seconds
    assert timed.order is not None
    links = hosts.link_s(known, timed.order, timed.analysis, timed.links)
    assert links[0, 1] == pytest.approx(2 * 4 * 4 / 100)
    # Two micro-batches of two examples go over the link and back, one after the other.
    shortest = flops.timeline.makespan_s / 2500
    assert shortest < timed.timeline.makespan_s <= shortest + 2 * 2 * links[0, 1]
    assert timed.step_s == pytest.approx(timed.timeline.makespan_s + 2 * 0.8)
