"""What translation models that two cores can train have in common: update, rate, pipeline."""

from __future__ import annotations

import dataclasses

from lingvo_gpipe import optim, pipelining, task
from lingvo_gpipe.tasks.mt import task as mt_task
from lingvo_gpipe.tasks.mt.decoding import scores
from lingvo_gpipe.tasks.mt.input import Translation
from lingvo_gpipe.tasks.mt.model import transformer

NUM_PARTITIONS = 2
NUM_MICRO_BATCHES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long and how fast a small model is trained.

    Attributes:
        max_steps: updates.
        peak_learning_rate: reached at the end of the warm-up.
        warmup_steps: updates of the warm-up; then the rate falls with the square root.
        average_decay: decay of the averaged weights, which are evaluated and decoded.
        accumulate: mini-batches of an update.
        evaluations: number of evaluations and checkpoints during the training.
    """

    max_steps: int
    peak_learning_rate: float
    warmup_steps: int
    average_decay: float
    accumulate: int = 1
    evaluations: int = 8


def translation(
    model: transformer.TranslationTransformer, data: Translation.Params, plan: TrainingPlan
) -> mt_task.TranslationTask.Params:
    """Return the task of a small model: Adam, gradients clipped at 1, averaged weights.

    Args:
        model: its sizes.
        data: its input; `multiple_of` is set so that mini-batches divide into micro-batches.
        plan: plan of the training.
    """
    data.multiple_of = NUM_MICRO_BATCHES
    return mt_task.TranslationTask.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=transformer.translation_transformer(model),
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
                    factor=round(
                        plan.peak_learning_rate * (model.units * plan.warmup_steps) ** 0.5, 6
                    ),
                    units=model.units,
                    warmup_steps=plan.warmup_steps,
                ),
            ),
            clip_norm=1.0,
            average=optim.Average.Params(decay=plan.average_decay),
            accumulate=plan.accumulate,
            max_steps=plan.max_steps,
            save_interval_steps=-(-plan.max_steps // plan.evaluations),
        ),
        eval=task.Eval(split="valid", best="log_perplexity", best_is="lowest"),
        score=scores.Scoring(split="test"),
    )
