"""Training from beginning to end: `run(params, logdir)` does from Python what the trainer does.

    from lingvo_gpipe.run import loop
    result = loop.run(params, "runs/mine", evaluate=True)

What a run depends on is in its params and its checkpoints; it can be killed at any instant, and
the same call goes on from the newest whole checkpoint with the same numbers. A log directory holds

    checkpoints/   the newest ones, each with the text of the run's params
    best/          the best one by `eval.best`
    train/, eval/  TensorBoard's files
    the input's assets, such as vocabulary.model
    result.json    written when the run is done
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import math
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors, task
from lingvo_gpipe.console import progress
from lingvo_gpipe.execution import placement
from lingvo_gpipe.input import Input
from lingvo_gpipe.plan import step_plan
from lingvo_gpipe.run import checkpoint, evaluation, learner, log_directory, restoring, summaries
from lingvo_gpipe.schedule import drawing

# What a best value is the best of: a metric of a part of some data.
_OF_BEST = ("eval.best", "eval.split", "input.records")


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a run came to.

    Attributes:
        step: updates done.
        checkpoint: prefix of the last checkpoint's files.
        metrics: of the last evaluation, by name; empty without one.
        ended: "max_steps", "patience" (early stopping) or "signal".
    """

    step: int
    checkpoint: str
    metrics: dict[str, float]
    ended: str


def run(
    params: Any,
    logdir: str | os.PathLike[str],
    *,
    evaluate: bool = False,
    start: str | None = None,
    report: Callable[[str], None] = logging.info,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Train a task, or go on with its training.

    Args:
        params: a `Task.Params`.
        logdir: of the run; made where it is missing.
        evaluate: evaluates at intervals and at the end, which early stopping and the best
            checkpoint need.
        start: checkpoint to take the first weights from; unread where the run has one of its own.
        report: takes each line that a user should read.
        should_stop: asked before each update; once true, the run saves and returns.

    Raises:
        UserError: the params, the log directory, data or devices do not fit; a loss is not finite.
    """
    task.check(params)
    prepare_devices(params.model)  # before an input begins TensorFlow
    source = params.input.instantiate()
    params = task.complete(params, source)
    folder = Path(logdir)
    with log_directory.locked(folder):
        change = log_directory.check_params(folder, params, report)
        running = _Run(params, source, folder, evaluate, report, should_stop)
        running.restore(start, change)
        running.keep_assets()
        log_directory.remove_result(folder)
        result = running.run()
        if result.ended != "signal":
            log_directory.write_result(folder, dataclasses.asdict(result))
    for line in _last_lines(params, folder, result):
        report(line)
    return result


def dry_run(
    params: Any,
    logdir: str | os.PathLike[str] | None,
    *,
    evaluate: bool = True,
    start: str | None = None,
    report: Callable[[str], None] = logging.info,
) -> None:
    """Try everything that could fail later: input, an update, an evaluation, a checkpoint.

    Args:
        params: a `Task.Params`.
        logdir: whether it could be used is tried, and nothing is left in it; None: not tried.
        evaluate: as in `run`.
        start: as in `run`.
        report: as in `run`.
    """
    task.check(params)
    prepare_devices(params.model)  # before an input begins TensorFlow
    source = params.input.instantiate()
    params = task.complete(params, source)
    if logdir is not None:
        log_directory.try_out(Path(logdir), params, source.assets())
    short = params.copy()
    short.train.max_steps = min(1, params.train.max_steps)
    with tempfile.TemporaryDirectory(prefix="lingvo_gpipe_dry_run_") as temporary:
        trial = _Run(short, source, Path(temporary), evaluate, report, lambda: False, max_batches=1)
        trial.restore(start, None)
        trial.checkpoints.restore(trial.run().step)
    tried = ("input", "an update", *(("an evaluation",) if evaluate else ()))
    report(f"dry run: {', '.join(tried)} and a checkpoint went well; nothing is kept")


class _Run:
    """One run of one process."""

    def __init__(
        self,
        params: Any,
        source: Input,
        logdir: Path,
        evaluate: bool,
        report: Callable[[str], None],
        should_stop: Callable[[], bool],
        max_batches: int | None = None,
    ) -> None:
        self._params = params.copy().freeze()
        self._logdir = logdir
        self._evaluates = evaluate
        self._report = report
        self._should_stop = should_stop
        self._max_batches = max_batches
        self._last: evaluation.Evaluation | None = None
        if params.eval.patience is not None and not evaluate:
            report("eval.patience does nothing in this run, which does not evaluate")
        threads = prepare_devices(params.model)
        self._input = source
        self._learner = learner.Learner(params, self._input.element_spec(training=True))
        evaluation.check_names(self._learner.pipe, params.eval)
        if evaluate:
            self._input.evaluation(params.eval.split)  # refused now, not after hours
        with tf.device("CPU:0"):
            self._position = tf.Variable(0, dtype=tf.int64)
            self._threads = tf.Variable(threads, dtype=tf.int64)
            # The last step that was evaluated; -1: the run does not evaluate.
            self._evaluated = tf.Variable(0 if evaluate else -1, dtype=tf.int64)
        objects = {
            **self._learner.objects,
            "input/position": self._position,
            "threads": self._threads,
            "eval/step": self._evaluated,
        }
        text = params.to_text()
        self._best: checkpoint.Best | None = None
        if params.eval.best is not None:
            self._best = checkpoint.Best(
                str(logdir / log_directory.BEST),
                objects,
                text,
                larger_is_better=task.highest_is_best(params.eval),
            )
        self._best_objects = _best_objects(self._best)
        self.checkpoints = checkpoint.Checkpoints(
            str(logdir / log_directory.CHECKPOINTS),
            objects | self._best_objects,
            text,
            keep=params.train.keep_checkpoints,
        )

    def run(self) -> Result:
        """Do the updates that are left."""
        train = self._params.train
        classes = self._input.class_names
        writers = _Writers(self._logdir, self._learner, self._params.to_text(), classes)
        shown = progress.Progress(total=train.max_steps, start=self._step)
        try:
            with contextlib.closing(writers), contextlib.closing(shown):
                writers.constants(self._step, self._input.constants())
                self._evaluate_if_due(writers)  # a signal may have cut it off
                for told in self._updates(writers):
                    shown.update(self._step, {"loss": told.loss})
                    if self._step % train.log_interval_steps == 0:
                        writers.update(self._step, told)
                    self._evaluate_if_due(writers)
                    if self._step % train.save_interval_steps == 0:
                        self.checkpoints.save(self._step)
                ended = self._ended()
                if self._evaluates and ended != "signal" and not self._is_evaluated_here():
                    self._evaluate(writers)
                    if not self._is_evaluated_here():
                        ended = "signal"
        except BrokenPipeError:  # who reads the lines is gone, such as a `tee` by the same Ctrl-C
            self.checkpoints.save(self._step)
            raise
        path = self.checkpoints.save(self._step)
        return Result(self._step, path, {} if self._last is None else self._last.values, ended)

    @property
    def _step(self) -> int:
        return int(self._learner.step.numpy())

    def _ended(self) -> str:
        """Tell why no further update is due, or that the user wants none."""
        if self._step >= self._params.train.max_steps:
            return "max_steps"
        return "patience" if self._out_of_patience() else "signal"

    def keep_assets(self) -> None:
        """Keep in the run's folder what its ids mean."""
        log_directory.keep_assets(self._logdir, self._input.assets())

    def restore(self, start: str | None, change: task.Change | None) -> None:
        """Go on from the newest whole checkpoint of the run, or begin.

        Args:
            start: checkpoint to begin from.
            change: how the params have changed since the newest checkpoint.
        """
        fresh = {key: variable.numpy() for key, variable in self._best_objects.items()}
        threads = tuple(self._threads.numpy())
        found = self.checkpoints.restore()
        if found is None:
            if start is not None:
                self._start_from(start)
            return
        for prefix, why in found.torn:
            self._report(f"{prefix} is torn and set aside: {why}")
        self._report(f"restored step={found.step}")
        if start is not None:
            self._report(f"{start} is not read: the run goes on from its own checkpoint")
        if change is not None and change.touches(*_OF_BEST):
            for key, value in fresh.items():
                self._best_objects[key].assign(value)
        self._recall_best(found.step)
        self._evaluated.assign(max(int(self._evaluated), 0) if self._evaluates else -1)
        before = tuple(self._threads.numpy())
        if before != threads:
            self._report(
                f"thread counts (between, inside operations) were {before[0]}, {before[1]} and "
                f"are {threads[0]}, {threads[1]}: the last bits of results may differ"
            )
            self._threads.assign(threads)

    def _recall_best(self, step: int) -> None:
        """Take the mark of `step` from the best one, if it was evaluated when it had been saved."""
        best = checkpoint.find(str(self._logdir / log_directory.BEST))[-1:]
        text = checkpoint.params_text(best[0]) if best else None
        if text is None or checkpoint.step_of(best[0]) != step:
            return
        if task.change(text, self._params.to_text()).touches(*_OF_BEST):
            return
        with contextlib.suppress(errors.CheckpointError):
            if checkpoint.read_value(best[0], "eval/step") == step:
                found = {key: checkpoint.read_value(best[0], key) for key in self._best_objects}
                for key, value in found.items():
                    self._best_objects[key].assign(value)
                self._evaluated.assign(step)

    def _start_from(self, start: str) -> None:
        """Take weights and statistics from a checkpoint of any network, as far as they fit."""
        settings = self._params.train.start
        by_path = self._learner.pipe.by_path
        anew = _fitting(settings.without, by_path)
        source = checkpoint.Checkpoints(
            str(self._logdir / log_directory.CHECKPOINTS), by_path, read_only=True
        )
        kinds = ("average", "variables") if settings.averages else ("variables",)
        matched = source.restore_matching(
            start,
            {
                path: () if path in anew else tuple(f"{kind}/{path}" for kind in kinds)
                for path in by_path
            },
        )
        if not matched.restored:
            raise errors.CheckpointError(
                f"--checkpoint={start} has no variable of this network"
                f"{' besides those of train.start.without' if anew else ''}. Give one of a network "
                "with layers of the same names"
            )
        self._report(f"started from {start}: {len(matched.restored)} variables restored")
        for what, told in (
            ("begins anew by train.start.without", anew),
            ("missing in it", matched.missing),
            ("unfit", tuple(matched.unfit.values())),
        ):
            for line in told:
                self._report(f"    {what}: {line}")
        kept = [
            log_directory.kept_assets(folder, self._input.asset_names)
            for folder in restoring.folders(None, start)
        ]
        own = self._input.assets()
        for name, content in next(filter(None, kept), own).items():
            if content != own[name]:
                self._report(
                    f"    another {name} there: what was learned of its ids does not hold here"
                )
        self._learner.begin_from_weights()

    def _updates(self, writers: _Writers) -> Iterator[_Told]:
        """Do updates until the last step, yielding what came of each."""
        train = self._params.train
        data = self._input.batches(self._params.model.seed, int(self._position.numpy()))
        source = iter(data)
        first = self._step
        while self._step < train.max_steps and not self._out_of_patience():
            if self._should_stop():
                return
            begun = time.perf_counter()
            batches = [next(source) for _ in range(train.accumulate)]
            drawn = time.perf_counter()
            if self._step == first:
                writers.pictures(first, self._input.pictures(batches[0]))
            traces = self._learner.num_traces
            step, scale = self._step, self._learner.updater.loss_scale
            told = self._learner.update(batches)
            finite = bool(told["update"]["finite"]) and math.isfinite(told["loss"])
            self._position.assign_add(train.accumulate)
            if not finite and not self._may_lower(scale):
                self._stop_at_nonfinite(batches, step)
            if step == first and self._evaluates and self._best is not None:
                pipe, name = self._learner.pipe, str(self._params.eval.best)
                evaluation.check_best(pipe, name, told["sums"])
            step_s = time.perf_counter() - drawn
            if self._step > first + 1 and self._learner.num_traces > traces:
                self._report(f"step {self._step} took {step_s:.1f} s: another shape was traced")
            yield _Told(
                told,
                rows=sum(evaluation.num_rows(self._learner.pipe, b) for b in batches),
                unread=dict(data.counts),
                input_s=drawn - begun,
                step_s=step_s,
            )

    def _may_lower(self, scale: tf.Tensor | None) -> bool:
        """Tell whether the next update, of a smaller loss scale than this, may be finite."""
        params = self._params.train.loss_scale
        return scale is not None and params.dynamic and float(scale) > 1.0

    def _stop_at_nonfinite(self, batches: Sequence[Any], step: int) -> None:
        places = (self._learner.pipe.first_nonfinite(batch, step=step) for batch in batches)
        place = next((place for place in places if place != "nowhere"), "the update itself")
        whole = checkpoint.find(self.checkpoints.directory)
        last = f"the last good checkpoint is {whole[-1]}" if whole else "there is no checkpoint yet"
        if not self._params.train.finite_guard:  # its weights are not finite by now either
            place += ", or before it (train.finite_guard=True tells the place)"
        raise errors.TrainingError(
            f"the update of step {step} is not finite: it began in {place}; {last}. Lower the "
            "rate (train.optimizer.learning_rate, or its fields), or set train.clip_norm"
        )

    def _evaluate_if_due(self, writers: _Writers) -> None:
        every = self._params.eval.interval_steps or self._params.train.save_interval_steps
        last = self._step >= self._params.train.max_steps  # before its checkpoint, which tells it
        due = self._step > 0 and (self._step % every == 0 or last)
        if self._evaluates and due and int(self._evaluated) != self._step:
            self._evaluate(writers)

    def _is_evaluated_here(self) -> bool:
        """Tell whether this process has evaluated the present step."""
        return self._last is not None and self._last.step == self._step

    def _evaluate(self, writers: _Writers) -> None:
        params = self._params.eval
        batches = evaluation.batches(self._input, params, self._max_batches)
        try:
            with self._learner.updater.averaged():
                found = evaluation.evaluate(
                    self._learner.pipe,
                    batches,
                    step=self._step,
                    metrics=params.metrics,
                    should_stop=self._should_stop,
                )
            value = 0.0 if found is None or params.best is None else found.number(params.best)
        except Exception:
            self.checkpoints.save(self._step)  # the updates before it are not lost
            raise
        if found is None:
            return
        self._last = found
        self._evaluated.assign(found.step)
        writers.evaluation(found)
        if self._best is not None:
            self._best.consider(value, found.step)
        self._report(found.line())

    def _out_of_patience(self) -> bool:
        patience = self._params.eval.patience
        if patience is None or self._best is None or not self._evaluates:
            return False
        return self._best.misses >= patience


def _fitting(patterns: Sequence[str], paths: Collection[str]) -> tuple[str, ...]:
    """Return the variable paths that begin anew.

    Raises:
        ParamsError: a pattern fits none; names the nearest.
    """
    found: set[str] = set()
    for pattern in patterns:
        fitting = {path for path in paths if fnmatch.fnmatchcase(path, pattern)}
        if not fitting:
            known = [*paths, *{path.split("/")[0] for path in paths}]
            near = errors.nearest(pattern.rstrip("/*"), known) or sorted(paths)[:3]
            raise errors.ParamsError(
                f"train.start.without names {pattern!r}, which fits no variable; nearest "
                f"{', '.join(map(repr, near))}. Patterns fit whole paths: NAME/* is a layer"
            )
        found |= fitting
    return tuple(path for path in paths if path in found)


def _best_objects(best: checkpoint.Best | None) -> dict[str, tf.Variable]:
    """Return what checkpoints hold of the best one; the same keys where none is kept."""
    if best is not None:
        return best.objects
    with tf.device("CPU:0"):
        return {
            "best/value": tf.Variable(-math.inf, dtype=tf.float64),
            "best/misses": tf.Variable(0, dtype=tf.int64),
        }


def _last_lines(params: Any, logdir: Path, result: Result) -> Iterator[str]:
    """Tell a user how a run ended."""
    if result.ended == "signal":
        yield f"saved step={result.step} in {result.checkpoint}; the same command goes on from it"
        return
    if result.ended == "patience":
        yield f"ended early: {params.eval.best} was not better {params.eval.patience} times"
    for name, value in result.metrics.items():
        if not name.startswith("loss"):
            yield f"{params.eval.split} {name} {value:.4f}"
    # The environment around this interpreter need not be active in the user's shell.
    found = shutil.which("tensorboard")
    program = ["tensorboard"] if found else [sys.executable, "-m", "tensorboard.main"]
    yield f"to see the curves: {shlex.join([*program, '--logdir', str(logdir)])}"


class _Told:
    """What came of an update; numbers are taken from their devices when asked for."""

    def __init__(
        self,
        told: dict[str, Any],
        *,
        rows: int,
        unread: dict[str, int],
        input_s: float,
        step_s: float,
    ) -> None:
        self._told = told
        self._rows = rows
        self._unread = unread
        self._input_s = input_s
        self._step_s = step_s

    @property
    def loss(self) -> float:
        return float(self._told["loss"])

    @property
    def sums(self) -> dict[str, Any]:
        found: dict[str, Any] = self._told["sums"]
        return found

    def scalars(self) -> dict[str, float]:
        whole_s = self._input_s + self._step_s
        losses = self._told["losses"]
        named = {f"loss/{name}": value for name, value in losses.items() if len(losses) > 1}
        told = {"loss": self._told["loss"], **named, **self._told["update"]}
        del told["finite"]
        weights = map(float, self._told["weights"].values())
        return {
            **{name: float(value) for name, value in told.items()},
            **{name: float(count) for name, count in self._unread.items()},
            # Of a translation's mini-batches rows, those included that only fill them.
            "examples_per_second": self._rows / whole_s,
            # Examples that labels are of, or tokens: what fills a mini-batch weighs nothing.
            "weight_per_second": max(weights, default=0.0) / whole_s,
            "input_wait_share": self._input_s / whole_s,
        }


class _Writers:
    """TensorBoard's files of a run: training and evaluation side by side."""

    def __init__(
        self, logdir: Path, learned: learner.Learner, text: str, classes: tuple[str, ...]
    ) -> None:
        """Begin with the run's params, and the picture of its schedule by estimated times."""
        self._train = summaries.Writer(logdir / "train")
        self._classes = classes
        self._folder = logdir / evaluation.EVALUATIONS
        self._eval = summaries.Writer(self._folder)
        self._learner = learned
        pipe = learned.pipe
        planned = step_plan.make(pipe.params, pipe.analysis.fields).timeline
        self._planned_bubble = planned.bubble_share
        step = int(learned.step.numpy())
        self._train.text(step, "params", text)
        stated = [pipe.params.costs, *(info.params.cost for info in pipe.analysis.layers)]
        unit = "FLOPs" if all(cost is None for cost in stated) else "of stated cost"
        self._train.png(step, "schedule", drawing.draw(planned, unit=unit))

    def update(self, step: int, told: _Told) -> None:
        scalars = told.scalars()
        for name, total in told.sums.items():
            metric = self._learner.pipe.metrics[name]
            result = metric.finish(total)
            scalars |= {name: result, **metric.curves(result)}
        self._train.scalars(
            step,
            scalars
            | {"bubble_share_planned": self._planned_bubble, "traces": self._learner.num_traces},
        )

    def constants(self, step: int, values: Mapping[str, float]) -> None:
        self._train.scalars(step, values)

    def pictures(self, step: int, samples: Mapping[str, Any]) -> None:
        for name, images in samples.items():
            self._train.images(step, name, images)

    def evaluation(self, found: evaluation.Evaluation) -> None:
        evaluation.write(self._eval, self._folder, found, self._classes)

    def close(self) -> None:
        self._train.close()
        self._eval.close()


def prepare_devices(model: Any) -> tuple[int, int]:
    """Make the logical CPU devices that a network needs, before TensorFlow's first operation.

    Args:
        model: a `PipeliningLayer.Params`.

    Returns:
        Thread counts between and inside operations, on which the last bits of results depend.
    """
    wanted = max(1, model.num_partitions)  # what is less is refused with the network
    kind = model.placement
    if kind == "tpu" and not tf.config.list_logical_devices("TPU"):
        placement.initialize_tpu()
    accelerated = kind == "auto" and tf.config.list_physical_devices("GPU")
    if kind in ("auto", "cpu") and model.devices is None and not accelerated:
        cpu = tf.config.list_physical_devices("CPU")[0]
        if len(tf.config.get_logical_device_configuration(cpu) or [cpu]) < wanted:
            placement.prepare_logical_cpus(wanted)
        # Where TensorFlow has begun, its threads stay as they are.
        with contextlib.suppress(RuntimeError):
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
            placement.prepare_threads(wanted, cores or os.cpu_count() or 1)
    return (
        tf.config.threading.get_inter_op_parallelism_threads(),
        tf.config.threading.get_intra_op_parallelism_threads(),
    )
