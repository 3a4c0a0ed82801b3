"""Training from start to end: `run(params, logdir)` does in Python what the trainer does.

    from lingvo_gpipe.run import loop
    result = loop.run(params, "runs/mine", evaluate=True)

A run depends only on its params and its checkpoints. It can be killed at any time; the same call
continues from the newest whole checkpoint with the same numbers. A log directory has

    checkpoints/   the newest ones, each with the text of the run's params
    best/          the best one by `eval.best`
    train/, eval/  TensorBoard's files
    the input's assets, such as vocabulary.model
    result.json    written when the run is done
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors, task
from lingvo_gpipe.cluster import connection, local
from lingvo_gpipe.console import progress
from lingvo_gpipe.execution.monitoring import stalls
from lingvo_gpipe.hooks.base import Ended
from lingvo_gpipe.hooks.calls import HookCalls, needing_network
from lingvo_gpipe.input import Input, synthetic
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.plan import auto
from lingvo_gpipe.run import (
    checkpoints,
    evaluation,
    log_directory,
    process,
    restoring,
    worker_input,
)
from lingvo_gpipe.run.learner import Learner
from lingvo_gpipe.run.profiles import prediction, recorder
from lingvo_gpipe.run.profiles.steps import NO_PROFILES, Profiles
from lingvo_gpipe.run.run_state import RunState
from lingvo_gpipe.run.views.examples import Examples
from lingvo_gpipe.run.views.histograms import Histograms
from lingvo_gpipe.run.views.texts import EvaluationTexts
from lingvo_gpipe.run.writers import StepReport, Writers
from lingvo_gpipe.task import Task


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """How a run ended.

    Attributes:
        step: number of updates.
        checkpoint: prefix of the last checkpoint's files.
        metrics: metrics of the last evaluation, by name; empty without one.
        ended: "max_steps", "patience" (early stopping), "hook" (one asked for it) or "signal".
        best: value of `eval.best` at the best checkpoint; None before the first evaluation.
    """

    step: int
    checkpoint: str
    metrics: dict[str, float]
    ended: Ended
    best: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Options:
    """Settings of a run that are not in its params.

    Attributes:
        evaluate: as in `run`.
        report: as in `run`.
        should_stop: as in `run`.
        note_step: as in `run`.
        profiles: as in `run`.
        dry_run: whether an evaluation has one mini-batch, and hooks write nothing elsewhere.
    """

    evaluate: bool
    report: Callable[[str], None]
    should_stop: Callable[[], bool] = lambda: False
    note_step: Callable[[int], None] = lambda _: None
    profiles: Profiles = NO_PROFILES
    dry_run: bool = False


def run(
    params: Task.Params,
    logdir: str | os.PathLike[str],
    *,
    evaluate: bool = False,
    start: str | None = None,
    report: Callable[[str], None] = logging.info,
    should_stop: Callable[[], bool] = lambda: False,
    note_step: Callable[[int], None] = lambda _: None,
    profiles: Profiles = NO_PROFILES,
) -> Result:
    """Train a task, or continue its training.

    Args:
        params: params of the task.
        logdir: log directory of the run; created if it is missing.
        evaluate: whether to evaluate at intervals and at the end; early stopping and the best
            checkpoint need it.
        start: checkpoint with the first weights; ignored if the run already has a checkpoint.
        report: receives each line that a user should read.
        should_stop: called before each update; once it returns True, the run saves and returns.
        note_step: called with the number of each update, before it begins.
        profiles: what is measured, or known of the hosts: layers before a schedule is chosen, slots
            of some updates.

    Raises:
        UserError: the params, the log directory, data or devices do not fit; a loss is not finite.
    """
    folder = Path(logdir)
    params, source = _prepare(params, report, folder)
    with log_directory.locked(folder):
        log_directory.check_made(folder, is_made=synthetic.is_synthetic(params))
        kept = log_directory.kept_values(folder)
        params = auto.resolved(
            params, report, kept=kept, profile=profiles.layers, cluster=profiles.hosts
        )
        process.check_memory(params, source, report, refuse=False)
        change = log_directory.check_params(folder, params, report)
        options = _Options(evaluate, report, should_stop, note_step, profiles)
        with contextlib.closing(_Training(params, source, folder, options)) as training:
            training.restore(start, change)
            log_directory.keep_assets(folder, source.assets())
            log_directory.remove_result(folder)
            result = training.train()
        if result.ended != "signal":
            log_directory.write_result(folder, dataclasses.asdict(result))
    for line in _last_lines(params, folder, result):
        report(line)
    return result


def dry_run(
    params: Task.Params,
    logdir: str | os.PathLike[str] | None,
    *,
    evaluate: bool = True,
    start: str | None = None,
    report: Callable[[str], None] = logging.info,
    profiles: Profiles = NO_PROFILES,
) -> None:
    """Try everything that could fail later: input, an update, an evaluation, a checkpoint.

    An input that cannot be served is reported: training needs no `serving`, but export does.

    Args:
        params: params of the task.
        logdir: checked for use; nothing is left in it. None: not checked.
        evaluate: as in `run`.
        start: as in `run`.
        report: as in `run`.
        profiles: as in `run`; no updates are timed.
    """
    params, source = _prepare(params, report, None)
    kept = None if logdir is None else log_directory.kept_values(Path(logdir))
    params = auto.resolved(
        params, report, kept=kept, profile=profiles.layers, cluster=profiles.hosts
    )
    process.check_memory(params, source, report, refuse=True)
    if logdir is not None:
        log_directory.try_out(Path(logdir), params, source.assets())
    short = params.copy()
    short.train.max_steps = min(1, params.train.max_steps)
    with tempfile.TemporaryDirectory(prefix="lingvo_gpipe_dry_run_") as temporary:
        options = _Options(evaluate, report, dry_run=True)
        with contextlib.closing(_Training(short, source, Path(temporary), options)) as trial:
            trial.restore(start, None)
            trial.state.checkpoints.restore(trial.train().step)
    try:
        params.instantiate().serving(source)
    except errors.InputError as error:
        report(f"--mode=export will not be possible: {error}, now or after training")
    tried = ("input", "an update", *(("an evaluation",) if evaluate else ()))
    report(f"dry run: {', '.join(tried)} and a checkpoint went well; nothing is kept")


def _prepare(
    params: Task.Params, report: Callable[[str], None], folder: Path | None
) -> tuple[Task.Params, Input]:
    """Check a task and complete it; return its params and its input."""
    task.check(params)
    for line in synthetic.notices(params):
        report(line)
    if folder is not None and local.is_private():
        away = needing_network(params.train)
        if away:
            raise errors.NoNetworkError(f"{', '.join(away)} reaches other hosts")
    process.prepare_devices(params.model, folder)  # before an input begins TensorFlow
    source: Input = params.input.instantiate()
    return task.complete(params, source), source


class _Training:
    """One run in one process.

    Attributes:
        state: what the run saves.
    """

    def __init__(self, params: Task.Params, source: Input, logdir: Path, options: _Options) -> None:
        self._params: Task.Params = params.copy().freeze()
        self._input = source
        self._logdir = logdir
        self._options = options
        self._last: evaluation.Evaluation | None = None
        if params.eval.patience is not None and not options.evaluate:
            options.report("eval.patience does nothing in this run, which does not evaluate")
        self._hooks = HookCalls(
            self._params,
            logdir,
            options.report,
            lambda work: self._watchdog.watching(work),
            dry_run=options.dry_run,
        )
        threads = process.prepare_devices(params.model, logdir)
        self._learner = Learner(params, source.element_spec(training=True))
        pipe = self._learner.pipe
        evaluation.check_names(pipe, params.eval)
        self._recorder: recorder.Recorder | None = None
        if options.profiles.steps:
            planned = prediction.planned(params, pipe) if options.profiles.layers else None
            self._recorder = recorder.Recorder(
                options.profiles.steps, self._learner, logdir, options.report, planned
            )
        self._source = worker_input.source_of(source, pipe.executor, options.report)
        if options.evaluate:
            self._source.evaluation(params.eval.split)  # refused now, not after hours
        self._histograms = Histograms(pipe, lambda: self._learner.updater.loss_scale)
        self._texts = EvaluationTexts(params, pipe, source, options.report)
        self.state = RunState(params, self._learner, logdir, threads, evaluates=options.evaluate)
        self._watchdog = stalls.watchdog_of(
            pipe.executor,
            params.train.stall_after_s,
            self.state.checkpoints.directory,
            options.report,
            ends=params.train.end_at_stall,
            over_workers=connection.current() is not None,
        )

    def restore(self, start: str | None, change: task.Change | None) -> None:
        """Continue from the newest whole checkpoint of the run, or start.

        Args:
            start: checkpoint to start from.
            change: how the params have changed since the newest checkpoint.
        """
        if self.state.restore(change, self._options.report):
            if start is not None:
                self._options.report(
                    f"{start} is not read: the run goes on from its own checkpoint"
                )
        elif start is not None:
            restoring.start_from(
                start, self._learner, self._params, self._input, self._options.report
            )

    def train(self) -> Result:
        """Do the updates that are left, and call the hooks."""
        writers = Writers(self._logdir, self._learner, self._params, self._input.class_names)
        with contextlib.closing(writers), self._watchdog:
            try:
                self._hooks.begin(self.state.step)
                result = self._train(writers)
            except BaseException:
                self._hooks.abort(self.state.step)
                raise
            self._hooks.end(result.step, result.metrics, result.ended)
        return result

    def _train(self, writers: Writers) -> Result:
        train, state = self._params.train, self.state
        shown = progress.Progress(total=train.max_steps, start=state.step)
        try:
            with contextlib.closing(shown):
                writers.constants(state.step, self._input.constants())
                self._evaluate_if_due(writers)  # a signal may have interrupted it
                for report in self._updates(writers):
                    step = state.step
                    shown.update(step, {"loss": report.loss})
                    curves = functools.cache(functools.partial(writers.curves, report))
                    if step % train.log_interval_steps == 0:
                        writers.update(step, curves())
                    self._hooks.after_update(step, curves)
                    self._evaluate_if_due(writers)
                    if self._hooks.takes_save() or step % train.save_interval_steps == 0:
                        with self._watchdog.watching(f"the checkpoint of step {step}"):
                            state.save()
                    self._note_checkpoints(writers, state.written())
                ended = self._ended()
                if self._recorder is not None:
                    self._recorder.finish(state.step)
                if self._options.evaluate and ended != "signal" and not self._is_evaluated_here():
                    self._evaluate(writers)
                    if not self._is_evaluated_here():
                        ended = "signal"
                with self._watchdog.watching(f"the checkpoint of step {state.step}"):
                    path = state.save()
                    written = state.wait()
                self._note_checkpoints(writers, written)
        except (BrokenPipeError, errors.HookError):
            # The reader of the lines has ended, such as `tee` by the same ^C; or a hook failed.
            state.save()
            raise
        best = None if state.best is None else state.best.value
        return Result(
            state.step,
            path,
            {} if self._last is None else self._last.values,
            ended,
            None if best is None or math.isinf(best) else best,
        )

    def _note_checkpoints(self, writers: Writers, written: Sequence[checkpoints.Written]) -> None:
        writers.checkpoints(written)
        for one in written:
            self._hooks.after_checkpoint(one.step, one.path, one.metrics)

    def close(self) -> None:
        """Wait until the checkpoints that were begun are written."""
        self.state.close(self._options.report)

    def _updates(self, writers: Writers) -> Iterator[StepReport]:
        """Do updates until the last step, yielding a report of each."""
        train, state = self._params.train, self.state
        data = self._source.batches(self._params.model.seed, int(state.position.numpy()))
        source = iter(data)
        first = state.step
        while (step := state.step) < train.max_steps and not state.is_out_of_patience:
            if self._hooks.stop_reason is not None or self._options.should_stop():
                return
            self._options.note_step(step)
            begun = time.perf_counter()
            with self._watchdog.watching(f"reading the mini-batch of step {step}"):
                batches = self._read(source)
            drawn = time.perf_counter()
            if step == first:
                with self._learner.pipe.executor.beside_input():
                    pictures = self._input.pictures(dict(batches[0]))
                writers.pictures(first, pictures)
            input_s = drawn - begun
            every = train.histogram_interval_steps
            if every and (step + 1) % every == 0:
                with self._watchdog.watching(f"the histograms of step {step}"):
                    group = self._learner.groups.cut(batches[0])[0].fields
                    counted = self._histograms(group, self._learner.step.read_value())
                writers.train.histograms(step + 1, counted)
                drawn = time.perf_counter()
            traces = self._learner.num_traces
            scale = self._learner.updater.loss_scale
            with self._watchdog.watching(f"step {step}", "step"), self._profiled(step + 1):
                result = self._learner.update(batches)
                finite = bool(result.scalars["finite"]) and math.isfinite(result.loss)
            state.position.assign_add(train.accumulate)
            if not finite and not self._may_lower(scale):
                self._stop_at_nonfinite(batches, step)
            if step == first and self._options.evaluate and state.best is not None:
                evaluation.check_best(self._learner.pipe, str(self._params.eval.best), result.sums)
            step_s = time.perf_counter() - drawn
            if self._recorder is not None:
                step_s -= self._recorder.record(step + 1, input_s, writers.train)
            if step > first and self._learner.num_traces > traces:
                self._options.report(
                    f"step {state.step} took {step_s:.1f} s: another shape was traced"
                )
            yield StepReport(
                result,
                num_rows=sum(evaluation.num_rows(self._learner.pipe, b) for b in batches),
                unread=dict(data.counts),
                input_s=input_s,
                step_s=step_s,
            )

    def _read(self, source: Iterator[Mapping[str, Nest]]) -> list[Mapping[str, Nest]]:
        """Return the mini-batches of an update; if they cannot be read, save what is trained."""
        position = int(self.state.position.numpy())
        try:
            return worker_input.next_batches(source, self._params.train.accumulate, position)
        except Exception as error:  # an input of the user's may raise anything
            if self.state.step and not isinstance(error, connection.lost_errors()):
                self.state.save()
            raise

    def _profiled(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Record a step, if it was chosen."""
        return contextlib.nullcontext() if self._recorder is None else self._recorder.watching(step)

    def _ended(self) -> Ended:
        """Return why the run ends: no further update is due, or somebody asked to stop."""
        if self.state.step >= self._params.train.max_steps:
            return "max_steps"
        if self.state.is_out_of_patience:
            return "patience"
        return "signal" if self._hooks.stop_reason is None else "hook"

    def _may_lower(self, scale: tf.Tensor | None) -> bool:
        """Return whether the next update, with a smaller loss scale, may be finite."""
        params = self._params.train.loss_scale
        return scale is not None and params is not None and params.dynamic and float(scale) > 1.0

    def _stop_at_nonfinite(self, batches: Sequence[Mapping[str, Nest]], step: int) -> None:
        place = self._learner.first_nonfinite(batches, step) or "the update itself"
        with contextlib.suppress(errors.CheckpointError):
            self.state.wait()
        whole = checkpoints.newest(self.state.checkpoints.directory)
        last = f"the last good checkpoint is {whole}" if whole else "there is no checkpoint yet"
        if not self._params.train.finite_guard:  # by now the weights are not finite either
            place += ", or before it (train.finite_guard=True shows the place)"
        raise errors.TrainingError(
            f"the update of step {step} is not finite: it began in {place}; {last}. Lower the "
            "rate (train.optimizer.learning_rate, or its fields), or set train.clip_norm"
        )

    def _evaluate_if_due(self, writers: Writers) -> None:
        step = self.state.step
        every = self._params.eval.interval_steps or self._params.train.save_interval_steps
        last = step >= self._params.train.max_steps  # before its checkpoint, which records it
        due = step > 0 and (step % every == 0 or last)
        if self._options.evaluate and due and not self.state.is_evaluated:
            self._evaluate(writers)

    def _is_evaluated_here(self) -> bool:
        """Return whether this process has evaluated the current step."""
        return self._last is not None and self._last.step == self.state.step

    def _evaluate(self, writers: Writers) -> None:
        params = self._params.eval
        step = self.state.step
        name = f"a mini-batch of the evaluation at step {step}"
        try:
            batches = evaluation.batches(self._source, params, 1 if self._options.dry_run else None)
            with self._learner.updater.averaged():
                evaluated = evaluation.evaluate(
                    self._learner.pipe,
                    batches,
                    step=step,
                    groups=self._learner.groups,
                    metrics=params.metrics,
                    should_stop=self._options.should_stop,
                    watch=lambda batches: self._watchdog.each(batches, name, "evaluation"),
                    examples=Examples(self._learner.pipe, self._input, params.examples),
                )
                if evaluated is not None:
                    with self._watchdog.watching(f"the texts of the evaluation at step {step}"):
                        evaluated = self._texts.added(evaluated, self._options.should_stop)
                    writers.evaluation(evaluated)
            value = 0.0
            if evaluated is not None and params.best is not None:
                value = evaluated.number(params.best)
        except Exception:
            self.state.save()  # the updates before it are not lost
            raise
        if evaluated is None:
            return
        self._last = evaluated
        self.state.record_evaluation(value)
        self._options.report(evaluated.line())
        self._hooks.after_evaluation(
            evaluated.step, evaluated.values | evaluated.curves | evaluated.unread
        )


def _last_lines(params: Task.Params, logdir: Path, result: Result) -> Iterator[str]:
    """Yield the last lines of a run: how it ended."""
    if result.ended == "signal":
        yield f"saved step={result.step} in {result.checkpoint}; the same command goes on from it"
        return
    if result.ended == "patience":
        yield f"ended early: {params.eval.best} was not better {params.eval.patience} times"
    for name, value in result.metrics.items():
        if not name.startswith("loss"):
            yield f"{params.eval.split} {name} {value:.4f}"
    yield from synthetic.notices(params)
    # The environment around this interpreter need not be active in the user's shell.
    found = shutil.which("tensorboard")
    program = ["tensorboard"] if found else [sys.executable, "-m", "tensorboard.main"]
    yield f"to see the curves: {shlex.join([*program, '--logdir', str(logdir)])}"
    kept = checkpoints.newest(str(logdir / log_directory.BEST))
    if result.best is not None and kept is not None:
        step = checkpoints.step_of(kept)
        yield f"best {params.eval.best} {result.best:.4f} at step {step}: {kept}"
