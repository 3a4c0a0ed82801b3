"""The last layer of a pipeline that `fit` trains: the losses and metrics of `compile`."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from lingvo_gpipe import hyperparams
from lingvo_gpipe.fitting.metric_sums import MetricSums
from lingvo_gpipe.fitting.objective import Objective
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


class CompiledLosses(base.Layer):
    """Outputs of a Keras model, labels, sample weights, inputs → the sum of the losses, unused."""

    class Params(base.Layer.Params):
        objective: Objective = hyperparams.required("The losses.")
        metrics: MetricSums | None = hyperparams.field(None, "Metrics that are sums; None: none.")

        def compared(self) -> tuple[str, ...]:
            """Return the fields with labels and sample weights."""
            return self.objective.names.compared()

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            dtype = self.policy.variable

            def weight(number: int) -> Callable[[dict[str, Nest]], tf.Tensor]:
                return lambda fields: tf.cast(self.objective.divisor(number, fields), dtype)

            return base.Meta(
                outputs=tf.TensorSpec([], dtype),
                activation_bytes=sum(map(base.spec_bytes, inputs)),
                metrics=() if self.metrics is None else self.metrics.specs(),
                losses=tuple(
                    base.LossSpec(
                        term.name, term.coefficient, weight(n), of_batch=term.divisor == "one"
                    )
                    for n, term in enumerate(self.objective.terms)
                ),
            )

    params: Params

    def fprop(self, theta: base.Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        objective = self.params.objective
        values = dict(zip(self.params.reads, inputs, strict=True))
        sums = [tf.cast(total, self.policy.variable) for total in objective.sums(values)]
        for term, total in zip(objective.terms, sums, strict=True):
            ctx.add_loss(term.name, total)
        if self.params.metrics is not None:
            for name, sums_of in self.params.metrics.of(values).items():
                ctx.add_sum(name, sums_of)
        return tf.add_n(sums)
