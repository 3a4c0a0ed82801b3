"""Transformer-L, the language models of the GPipe paper's Table 1 (Huang et al. 2019).

Known: d = 2048, 8192 hidden units, 32 heads, 32,000 ids, rows of 1,024 in mini-batches of 32, the
number of partitions, "RMSProp". UNKNOWN: the text, micro-batches, precision of activations, rates.
Chosen: M = 32, float32, RMSProp with a tenth of Lingvo's learning rate.
"""

from __future__ import annotations

from lingvo_gpipe import optim, pipelining, registry
from lingvo_gpipe.task import Eval, Task, Train
from lingvo_gpipe.tasks.lm import transformer
from lingvo_gpipe.tasks.lm.input import Tokens

LENGTH = 1024
ROWS = 32


class _Transformer(registry.Model):
    """Transformer-L on ids in data_dir/SPLIT.npy."""

    num_layers = 3
    num_partitions = 1
    num_micro_batches = 32
    _recompute = "full"

    def task(self) -> Task.Params:
        """Return the task."""
        rate = optim.InverseSquareRoot.Params(factor=0.3, units=2048, warmup_steps=10_000)
        return Task.Params(
            model=pipelining.PipeliningLayer.Params(
                layers=transformer.language_model(self.num_layers),
                num_partitions=self.num_partitions,
                num_micro_batches=self.num_micro_batches,
                recompute=self._recompute,
            ),
            input=Tokens.Params(batch_size=ROWS, data_dir="data/lm", length=LENGTH),
            train=Train(
                # Weight and two slots, 12 bytes a parameter: the paper's memory column.
                optimizer=optim.Optimizer.Params(
                    name="RMSprop",
                    # Keras adds epsilon under the root; clipped gradients are as small as 1e-11.
                    config={"rho": 0.9, "momentum": 0.9, "epsilon": 1e-14},
                    learning_rate=rate,
                ),
                clip_norm=1.0,
                max_steps=100_000,
                save_interval_steps=1_000,
            ),
            eval=Eval(best="log_perplexity", best_is="lowest"),
        )


class L3(_Transformer):
    """282M parameters on one device, "Naive-1": no micro-batches, all kept."""

    num_micro_batches = 1
    _recompute = "never"


class L13(_Transformer):
    """786M parameters, "Pipeline-1"."""

    num_layers = 13


class L103(_Transformer):
    """5.3B parameters, "Pipeline-8"."""

    num_layers = 103
    num_partitions = 8


class L415(_Transformer):
    """21.0B parameters, "Pipeline-32"."""

    num_layers = 415
    num_partitions = 32


class L1663(_Transformer):
    """83.9B parameters, "Pipeline-128"."""

    num_layers = 1663
    num_partitions = 128
