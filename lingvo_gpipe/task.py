"""A task: one Params tree that says what is trained, on what, how, and how it is measured.

Its root fields are what overrides name: `model.num_micro_batches`, `input.batch_size`,
`train.optimizer.learning_rate`, `eval.interval_steps`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, TypeVar

from lingvo_gpipe import callbacks, errors, hyperparams, optim, pipelining
from lingvo_gpipe.hyperparams import text as params_texts
from lingvo_gpipe.input import Input
from lingvo_gpipe.input.serving import Program, Serving


class Start(hyperparams.Params):
    """What a run takes from another run's checkpoint, with which it begins."""

    without: tuple[str, ...] = hyperparams.field(
        (), "Glob patterns of variable paths that are not taken, such as classifier/*."
    )


class Train(optim.Updater.Params):
    """How a network is trained: the fields of the update, and when to end, save and log."""

    max_steps: int = hyperparams.required("Updates to train for.")
    accumulate: int = hyperparams.field(1, "A: mini-batches whose gradients make one update.")
    save_interval_steps: int = hyperparams.field(
        500, "Updates between two checkpoints; the last step is always saved."
    )
    keep_checkpoints: int = hyperparams.field(
        3, "How many of the newest checkpoints are kept, besides the best."
    )
    async_checkpoints: bool = hyperparams.field(
        True,
        "Writes checkpoints while training goes on. The values of weights and slots stay in "
        "memory until they are written.",
    )
    log_interval_steps: int = hyperparams.field(
        10, "Updates between two points of TensorBoard's curves."
    )
    stall_after_s: float = hyperparams.field(
        600.0,
        "Seconds after which a mini-batch that is not read, or a step that does not end, is "
        "reported with the state of every device; 0: never.",
    )
    start: Start = hyperparams.field(Start(), "What is taken from another run's checkpoint.")
    callbacks: tuple[callbacks.Callback.Params, ...] = hyperparams.field(
        (), "Callbacks of the run, in this order, such as callbacks.CSVLogger."
    )


class Eval(hyperparams.Params):
    """How a network is evaluated, and what the result decides."""

    split: str = hyperparams.field("test", "Part of the data that is evaluated.")
    interval_steps: int | None = hyperparams.field(
        None, "Updates between two evaluations in train_eval; None: at each checkpoint."
    )
    metrics: tuple[str, ...] = hyperparams.field((), "Names of metrics to report; empty: all.")
    best: str | None = hyperparams.field(
        None, "Metric or loss whose best checkpoint is kept; None: no checkpoint is better."
    )
    best_is: Literal["highest", "lowest"] | None = hyperparams.field(
        None,
        "Which value of `best` is the best; None: the lowest of losses and log_perplexity, "
        "else the highest.",
    )
    examples: int = hyperparams.field(
        16,
        "Images shown in TensorBoard with their label and prediction, the most confident mistakes "
        "first; 0: none.",
    )
    patience: int | None = hyperparams.field(
        None, "Evaluations without a better `best` after which training ends; None: never."
    )


def highest_is_best(params: Eval) -> bool:
    """Return whether the highest value of `params.best` is the best one."""
    if params.best_is is not None:
        return params.best_is == "highest"
    name = str(params.best)
    return not (name == "loss" or name.startswith("loss/") or name.endswith("log_perplexity"))


Texts: TypeAlias = Callable[[], Mapping[str, str]]
"""Makes the texts of an evaluation from the present weights: name in TensorBoard → Markdown."""


class Task(hyperparams.Configurable):
    """What `lingvo_gpipe.run.loop.run` takes; a field's task may subclass it and add fields."""

    class Params(hyperparams.Configurable.Params):
        """Root of a task's tree."""

        name: str = hyperparams.field("", "Registered name of the model; the trainer fills it in.")
        model: pipelining.PipeliningLayer.Params = hyperparams.required("The network.")
        input: Input.Params = hyperparams.required("The data.")
        train: Train = hyperparams.required("How it is trained.")
        eval: Eval = hyperparams.field(Eval(), "How it is measured.")

    def serving(self, source: Input) -> Serving | Program:
        """Return how the exported model is called; a task with fields of its own may override it.

        Args:
            source: the task's input.

        Raises:
            InputError: it knows no way.
        """
        return source.serving()

    def texts(self, pipe: pipelining.PipeliningLayer, source: Input) -> Texts | None:
        """Return what makes the texts that an evaluation shows, called after each; None: none.

        Args:
            pipe: the network, built.
            source: the task's input.

        Raises:
            UserError: they cannot be made; evaluations go on without them.
        """
        del pipe, source
        return None


# What makes another run of it, as patterns of paths, and what below these may change: how the same
# numbers are computed, how long, and what is reported.
_FIXED = (
    "class",
    "model.class",
    "model.dtype",
    "model.frozen",
    "model.inputs",
    "model.layers*",
    "model.outputs",
    "model.seed",
    "input.*",
    "train.class",
    "train.accumulate",
    "train.average*",
    "train.loss_scale*",
    "train.optimizer*",
    "train.weight_decay*",
)
_MAY_CHANGE = (
    "model.layers*.slices",
    "model.layers*.recompute",
    "model.layers*.cost",
    "input.*data_dir",
    "input.*max_broken_share",
    "input.eval_batch_size",
    "input.on_worker",
    "train.optimizer.learning_rate*",
    "train.optimizer.groups",
    "train.loss_scale.initial",  # a run that goes on has its scale
)
_NO_NAME = "''"


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """How the params of a run differ from those with which it began.

    Attributes:
        lines: `path: old -> new`, `- path: old`, `+ path: new`.
        refused: those of them below model, input and train that make it another run.
        models: names of the models then and now, as texts, where both are known and differ.
    """

    lines: tuple[str, ...]
    refused: tuple[str, ...]
    models: tuple[str, str] | None

    def touches(self, *paths: str) -> bool:
        """Return whether a field whose path begins with one of `paths` has changed."""
        return any(
            line.removeprefix("- ").removeprefix("+ ").startswith(paths) for line in self.lines
        )


def change(old: str, new: str) -> Change:
    """Compare two texts of `Task.Params` line by line; neither needs to be readable here."""
    before, after = params_texts.written_values(old), params_texts.written_values(new)
    lines = params_texts.changed_lines(before, after)
    refused = tuple(line for path, line in lines.items() if _is_fixed(path))
    names = before.get("name", _NO_NAME), after.get("name", _NO_NAME)
    models = names if names[0] != names[1] and _NO_NAME not in names else None
    return Change(tuple(lines.values()), refused, models)


def _is_fixed(path: str) -> bool:
    def fits(patterns: tuple[str, ...]) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)

    return fits(_FIXED) and not fits(_MAY_CHANGE)


def is_complete(params: Task.Params) -> bool:
    """Return whether every layer knows its number of classes, so that no data need be read."""
    return all(
        value is not None
        for _, value, declared in params.model.iter_paths()
        if declared.name == "classes"
    )


_Params = TypeVar("_Params", bound="Task.Params")


def complete(params: _Params, source: Input | None = None) -> _Params:
    """Return a copy of a task with the fields that only its data determines.

    Args:
        params: params of the task.
        source: its input; None: it is made.

    Raises:
        UserError: the data cannot be read, or the model does not fit it.
    """
    completed: _Params = params.copy()
    (source or completed.input.instantiate()).complete(completed)
    return completed


def check(params: Task.Params) -> None:
    """Refuse values that no single part of the task can check.

    Raises:
        ParamsError: a number is out of range, or fields contradict each other; names the field.
    """
    train, evaluation = params.train, params.eval
    least = {
        "train.max_steps": (train.max_steps, 0),
        "train.accumulate": (train.accumulate, 1),
        "train.save_interval_steps": (train.save_interval_steps, 1),
        "train.keep_checkpoints": (train.keep_checkpoints, 1),
        "train.log_interval_steps": (train.log_interval_steps, 1),
        "eval.interval_steps": (evaluation.interval_steps, 1),
        "eval.patience": (evaluation.patience, 1),
        "eval.examples": (evaluation.examples, 0),
    }
    for path, (value, smallest) in least.items():
        if value is not None and value < smallest:
            raise errors.ParamsError(f"{path}={value} is too small. Use {smallest} or more")
    if evaluation.patience is not None and evaluation.best is None:
        raise errors.ParamsError(
            f"eval.patience={evaluation.patience} needs a metric to watch. Set eval.best, such as "
            "eval.best=accuracy"
        )
