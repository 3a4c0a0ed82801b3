"""What translation models that two cores can train have in common: update, rate, pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lingvo_gpipe import optim, pipelining, task
from lingvo_gpipe.tasks.mt import task as mt_task
from lingvo_gpipe.tasks.mt.decoding import scores
from lingvo_gpipe.tasks.mt.input import Translation

NUM_PARTITIONS = 2
NUM_MICRO_BATCHES = 4


def translation(
    layers: Sequence[Any],
    data: Translation.Params,
    *,
    max_steps: int,
    units: int,
    peak: float,
    warmup_steps: int,
    average: float,
    accumulate: int = 1,
    evaluations: int = 8,
) -> Any:
    """Return the task of a small model: Adam, gradients clipped at 1, averaged weights.

    Args:
        layers: of the model.
        data: its input; the rows of a mini-batch are made to divide into micro-batches.
        max_steps: updates.
        units: model dimension, by which the rate is told.
        peak: highest learning rate, at the end of the rise.
        warmup_steps: updates of the rise, after which the rate falls with the root.
        average: decay of the averaged weights, which are evaluated and decoded.
        accumulate: mini-batches of an update.
        evaluations: how often it is evaluated and saved on the way.
    """
    data.multiple_of = NUM_MICRO_BATCHES
    return mt_task.TranslationTask.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=list(layers),
            num_partitions=NUM_PARTITIONS,
            num_micro_batches=NUM_MICRO_BATCHES,
            recompute="never",
        ),
        input=data,
        train=task.Train(
            optimizer=optim.Optimizer.Params(
                name="Adam",
                config={"beta_1": 0.9, "beta_2": 0.98, "epsilon": 1e-9},
                learning_rate=optim.InverseSquareRoot.Params(
                    factor=round(peak * (units * warmup_steps) ** 0.5, 6),
                    units=units,
                    warmup_steps=warmup_steps,
                ),
            ),
            clip_norm=1.0,
            average=optim.Average.Params(decay=average),
            accumulate=accumulate,
            max_steps=max_steps,
            save_interval_steps=-(-max_steps // evaluations),
        ),
        eval=task.Eval(split="valid", best="log_perplexity", best_is="lowest"),
        score=scores.Scoring(split="test"),
    )
