from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe import layers, network, pipelining
from lingvo_gpipe.network.traffic import links

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
    found = links.links(analysis, links.Stream(analysis))
    one = N * D * 4
    assert found == (
        links.Link(links.INPUT, 0, one, 0, ("x",)),
        links.Link(links.INPUT, 3, 3 * one, 0, ("target",)),
        links.Link(0, 1, one, one, ("skip",)),
        # Its value is there; the gradient of each cell comes back by itself.
        links.Link(0, 3, 0, one, ("skip",)),
        links.Link(2, 3, one, one, ("y1",)),
    )


def test_a_value_that_is_there_and_needs_no_gradient_is_no_link() -> None:
    analysis = skip_to_three(frozen=("first/*",))
    found = links.links(analysis, links.Stream(analysis))
    of_first = [link for link in found if link.source == 0]
    assert of_first == [links.Link(0, 1, N * D * 4, 0, ("skip",))]
