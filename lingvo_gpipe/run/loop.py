"""Training from start to end: `run(params, logdir)` does in Python what the trainer does.

    from lingvo_gpipe.run import loop
    result = loop.run(params, "runs/mine", evaluate=True)

A run depends only on its params and its checkpoints. It can be killed at any time; the same call
continues from the newest whole checkpoint with the same numbers. A log directory has

    checkpoints/   the newest ones, each with the text of the run's params
    best/          the best one by `eval.best`
    train/, eval/  TensorBoard's files
    the input's assets, such as vocabulary.model
    data.json      what describes the training data
    result.json    written when the run is done
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import keras
import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors, task
from lingvo_gpipe.callbacks import RunModel, RunOptimizer
from lingvo_gpipe.cluster import chief
from lingvo_gpipe.console import progress
from lingvo_gpipe.execution import monitoring
from lingvo_gpipe.input import Input, Reading, synthetic
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.network import parts
from lingvo_gpipe.plan import auto, describe
from lingvo_gpipe.plan.hosts import Hosts
from lingvo_gpipe.run import (
    checkpoints,
    evaluation,
    log_directory,
    process,
    restoring,
    worker_input,
)
from lingvo_gpipe.run.examples import Examples
from lingvo_gpipe.run.learner import Learner
from lingvo_gpipe.run.profiles import Recorder
from lingvo_gpipe.run.run_state import RunState
from lingvo_gpipe.run.tensorboard import RunWriters, StepReport
from lingvo_gpipe.task import Task

Batches = Sequence[Mapping[str, Nest]]
Ended = Literal["max_steps", "patience", "callback", "signal"]


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """How a run ended.

    Attributes:
        step: number of updates.
        checkpoint: prefix of the last checkpoint's files.
        metrics: metrics of the last evaluation, by name; empty without one.
        ended: "max_steps", "patience" (early stopping), "callback" (one has set `stop_training`)
            or "signal".
        best: value of `eval.best` at the best checkpoint; None before the first evaluation.
    """

    step: int
    checkpoint: str
    metrics: dict[str, float]
    ended: Ended
    best: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Options:
    """Settings of a run that are not in its params; see `run`."""

    evaluate: bool
    report: Callable[[str], None]
    should_stop: Callable[[], bool]
    note_step: Callable[[int], None]
    profile_steps: range
    callbacks: Sequence[keras.callbacks.Callback]


def run(
    params: Task.Params,
    logdir: str | os.PathLike[str],
    *,
    evaluate: bool = False,
    start: str | None = None,
    report: Callable[[str], None] = logging.info,
    should_stop: Callable[[], bool] = lambda: False,
    note_step: Callable[[int], None] = lambda _: None,
    profile_layers: bool = False,
    profile_steps: range = range(0),
    hosts: Hosts | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
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
        profile_layers: whether the schedule "auto" is chosen by measured times of layers.
        profile_steps: updates whose slots are timed, from 1 on.
        hosts: links and memory by which "auto" chooses; they place no cell. None: not known.
        callbacks: called besides `train.callbacks`; their `model` is a `callbacks.RunModel`.

    Raises:
        UserError: the params, the log directory, data or devices do not fit; a loss is not finite.
    """
    folder = Path(logdir)
    task.check(params)
    for line in synthetic.notices(params):
        report(line)
    process.prepare_devices(params.model)  # before an input begins TensorFlow
    source: Input = params.input.instantiate()
    params = task.complete(params, source)
    if params.eval.patience is not None and not evaluate:
        report("eval.patience ends nothing: a run without evaluations (--mode=train_eval has them)")
    with log_directory.locked(folder):
        kept = log_directory.kept_values(folder)
        params = auto.resolved(params, report, kept=kept, profile=profile_layers, cluster=hosts)
        change = log_directory.check_params(folder, params, report)
        options = _Options(evaluate, report, should_stop, note_step, profile_steps, callbacks)
        with contextlib.closing(_Training(params, source, folder, options)) as training:
            training.restore(start, change)
            log_directory.keep_assets(folder, source.assets())
            log_directory.keep_fingerprint(folder, source.fingerprint(), report)
            log_directory.remove_result(folder)
            result = training.train()
        if result.ended != "signal":
            log_directory.write_result(folder, dataclasses.asdict(result))
    for line in _last_lines(params, folder, result):
        report(line)
    return result


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
        process.prepare_devices(params.model)
        self._learner = Learner(params, source.element_spec(training=True))
        pipe = self._pipe = self._learner.pipe
        evaluation.check_names(pipe, params.eval)
        self._recorder: Recorder | None = None
        if options.profile_steps:
            self._recorder = Recorder(options.profile_steps, self._learner, logdir, options.report)
        self._source = worker_input.source_of(source, pipe.executor, options.report)
        if options.evaluate:
            self._source.evaluation(params.eval.split)  # refused now, not after hours
        self._texts: task.Texts | None = None
        self.state = RunState(params, self._learner, logdir, evaluates=options.evaluate)
        self._model = RunModel(
            self._params,
            logdir,
            options.report,
            RunOptimizer(self._learner.updater.optimizer, self._learner.step),
            lambda: describe.describe_network(pipe.params, pipe.analysis.fields).splitlines(),
        )
        # Updates between two evaluations, or two checkpoints: an epoch, for callbacks.
        self._epoch_steps = params.eval.interval_steps or params.train.save_interval_steps
        self._callbacks = self._listed_callbacks()
        self._watchdog = self._new_watchdog()

    def _new_watchdog(self) -> monitoring.Watchdog:
        """Return what reports work that does not end; over workers, it also ends the process."""
        stall_after_s, report = self._params.train.stall_after_s, self._options.report
        if not stall_after_s:
            return monitoring.Watchdog(0.0, list, report)
        end = None
        if chief.current() is not None:
            end = monitoring.exit_at_stall(self.state.checkpoints.directory, report)
        describe = self._pipe.executor.follow_progress().lines
        return monitoring.Watchdog(stall_after_s, describe, report, end)

    def _listed_callbacks(self) -> keras.callbacks.Callback | None:
        """Return the run's callbacks as one; None: it has none."""
        of_recipe = [params.make(self._logdir) for params in self._params.train.callbacks]
        callbacks = [*of_recipe, *self._options.callbacks]
        if not callbacks:
            return None
        epochs = -(-self._params.train.max_steps // self._epoch_steps)
        return keras.callbacks.CallbackList(
            callbacks, model=self._model, epochs=epochs, steps=self._epoch_steps, verbose=0
        )

    def restore(self, start: str | None, change: task.Change | None) -> None:
        """Continue from the newest whole checkpoint of the run, or start.

        Args:
            start: checkpoint to start from.
            change: how the params have changed since the newest checkpoint.
        """
        report = self._options.report
        if self.state.restore(change, report):
            if start is not None:
                report(f"{start} is not read: the run goes on from its own checkpoint")
        elif start is not None:
            restoring.start_from(start, self._learner, self._params, self._input, report)

    def train(self) -> Result:
        """Do the updates that are left."""
        train, state = self._params.train, self.state
        writers = RunWriters(self._logdir, self._learner, self._params, self._input.class_names)
        shown = progress.Progress(total=train.max_steps, start=state.step)
        with contextlib.closing(writers), contextlib.closing(shown), self._watchdog:
            self._first_step = self._epoch_ended_at = state.step
            with self._saving_on_error():
                self._call("on_train_begin")
                is_due = self._options.evaluate and self._epoch_ends()
                if is_due and not state.is_evaluated:  # a signal came before that
                    self._evaluate(writers)
            curves: dict[str, float] = {}
            for batches, input_s in self._mini_batches(writers):
                batch = state.step % self._epoch_steps
                report = self._update(batches, input_s, writers)
                with self._saving_on_error():
                    shown.update(state.step, {"loss": report.loss})
                    is_logged = state.step % train.log_interval_steps == 0
                    if is_logged or self._callbacks is not None:
                        curves = writers.curves(report)
                    if is_logged:
                        writers.train.scalars(state.step, curves)
                    self._call("on_train_batch_end", batch, curves)
                    if self._epoch_ends():
                        self._end_epoch(writers, curves)
                if state.step % train.save_interval_steps == 0:
                    with self._watchdog.watching(f"the checkpoint of step {state.step}"):
                        state.save()
                state.check_written()
            ended = self._ended()
            if self._recorder is not None:
                self._recorder.finish(state.step)
            if ended != "signal" and not self._end_epoch(writers, curves):
                ended = "signal"
            with self._watchdog.watching(f"the checkpoint of step {state.step}"):
                path = state.save()
                state.wait()
            metrics = {} if self._last is None else self._last.values
            self._call("on_train_end", metrics)
        return Result(state.step, path, metrics, ended, state.best_value)

    def close(self) -> None:
        """Wait until the checkpoints that were begun are written."""
        self.state.close(self._options.report)

    def _mini_batches(self, writers: RunWriters) -> Iterator[tuple[Batches, float]]:
        """Yield the mini-batches of each update, and the seconds that reading them took."""
        train, state, options = self._params.train, self.state, self._options
        data = self._source.batches(self._params.model.seed, int(state.position.numpy()))
        if not isinstance(data, Reading):
            raise errors.InputError(
                f"{type(self._input).__name__}.batches returns a {type(data).__name__}, expected "
                "lingvo_gpipe.input.Batches(dataset) of a tf.data.Dataset; its from_generator "
                "takes a generator"
            )
        self._unread = data.counts
        source = iter(data)
        epoch = -1
        while (step := state.step) < train.max_steps and not state.is_out_of_patience:
            if self._model.stop_training or options.should_stop():
                return
            options.note_step(step)
            if epoch != step // self._epoch_steps:  # once, though an update may be skipped
                epoch = step // self._epoch_steps
                self._call("on_epoch_begin", epoch)
            begun = time.perf_counter()
            with (
                self._saving_on_error(),
                self._watchdog.watching(f"reading the mini-batch of step {step}"),
            ):
                batches = list(itertools.islice(source, train.accumulate))
                if len(batches) < train.accumulate:
                    raise errors.InputError(
                        f"the training data ended after {int(state.position) + len(batches)} "
                        "mini-batches. Input.batches must be endless: let it begin again at the "
                        "end of the data"
                    )
            input_s = time.perf_counter() - begun
            if step == self._first_step:
                with self._pipe.executor.on_input_device():
                    pictures = self._input.pictures(dict(batches[0]))
                for name, images in pictures.items():
                    writers.train.images(step, name, images)
            self._call("on_train_batch_begin", step % self._epoch_steps)
            yield batches, input_s

    def _update(self, batches: Batches, input_s: float, writers: RunWriters) -> StepReport:
        """Do one update.

        Raises:
            TrainingError: it is not finite.
            InputError: it is not finite because a field of the data is not.
        """
        learner, step = self._learner, self.state.step
        begun, traces = time.perf_counter(), learner.num_traces
        scale = learner.updater.loss_scale
        with self._watchdog.watching(f"step {step}"):
            result = learner.update(batches)
            finite = bool(result.scalars["finite"]) and math.isfinite(result.loss)
        self.state.position.assign_add(len(batches))
        if not finite and not self._may_lower(scale):
            raise self._not_finite(batches, step)
        step_s = time.perf_counter() - begun
        if step > self._first_step and learner.num_traces > traces:
            self._options.report(f"step {step + 1} took {step_s:.1f} s: another shape was traced")
        if self._recorder is not None:
            self._recorder.record(step + 1, input_s, writers.train)
        return StepReport(
            result,
            num_rows=sum(map(parts.num_examples, batches)),
            unread=dict(self._unread),
            input_s=input_s,
            step_s=step_s,
        )

    def _may_lower(self, scale: tf.Tensor | None) -> bool:
        """Return whether the next update, with a smaller loss scale, may be finite."""
        params = self._params.train.loss_scale
        return scale is not None and params is not None and params.dynamic and float(scale) > 1.0

    def _not_finite(self, batches: Batches, step: int) -> errors.UserError:
        """Return the error for an update that is not finite, with the place where it began."""
        field = self._learner.nonfinite_field(batches)
        with contextlib.suppress(errors.CheckpointError):
            self.state.wait()
        whole = checkpoints.newest(self.state.checkpoints.directory)
        last = f"the last good checkpoint is {whole}" if whole else "there is no checkpoint yet"
        if field is not None:
            number = int(self.state.position.numpy()) - len(batches) + field.batch
            return errors.InputError(
                f"the update of step {step} is not finite, because mini-batch {number} is not: its "
                f"field {field.name!r} holds a NaN or an infinity in row {field.row}; {last}. "
                "Correct the data"
            )
        place = self._learner.first_nonfinite(batches, step) or "the update itself"
        if not self._params.train.finite_guard:  # by now the weights are not finite either
            place += ", or before it (train.finite_guard=True shows the place)"
        return errors.TrainingError(
            f"the update of step {step} is not finite: it began in {place}; {last}. Lower the "
            "rate (train.optimizer.learning_rate, or its fields), or set train.clip_norm"
        )

    def _ended(self) -> Ended:
        """Return why the run ends: no further update is due, or somebody asked to stop."""
        if self.state.step >= self._params.train.max_steps:
            return "max_steps"
        if self.state.is_out_of_patience:
            return "patience"
        return "callback" if self._model.stop_training else "signal"

    def _epoch_ends(self) -> bool:
        """Return whether the present step is the last of an epoch, or of the run."""
        step = self.state.step
        return step > 0 and (step % self._epoch_steps == 0 or step >= self._params.train.max_steps)

    def _end_epoch(self, writers: RunWriters, curves: Mapping[str, float]) -> bool:
        """Evaluate if this run does so; return False if a signal interrupted it."""
        step, last = self.state.step, self._last
        if self._options.evaluate and (last is None or last.step != step):
            with self._saving_on_error():
                self._evaluate(writers)
            last = self._last
            if last is None or last.step != step:
                return False
        logs = dict(curves)
        if last is not None:
            logs |= {f"val_{name}": value for name, value in last.numbers.items()}
        if self._epoch_ended_at != step:
            self._epoch_ended_at = step
            self._call("on_epoch_end", (step - 1) // self._epoch_steps, logs)
        return True

    def _evaluate(self, writers: RunWriters) -> None:
        """Evaluate the present weights, and keep the checkpoint if it is the best."""
        params, options, step = self._params.eval, self._options, self.state.step
        name = f"a mini-batch of the evaluation at step {step}"
        self._call("on_test_begin")
        batches = self._source.evaluation(params.split)
        with self._learner.updater.averaged():
            evaluated = evaluation.evaluate(
                self._pipe,
                batches,
                step=step,
                metrics=params.metrics,
                should_stop=options.should_stop,
                watch=lambda batches: self._watchdog.each(batches, name),
                examples=Examples(self._pipe, self._input, params.examples),
            )
            if evaluated is None:
                return
            with self._watchdog.watching(f"the texts of the evaluation at step {step}"):
                if self._texts is None:
                    self._texts = evaluation.texts_of(
                        self._params, self._pipe, self._input, options.report
                    )
                evaluated = dataclasses.replace(evaluated, texts=dict(self._texts()))
        writers.evaluation(evaluated)
        value = 0.0 if params.best is None else evaluated.number(params.best)
        self._last = evaluated
        self.state.record_evaluation(value)
        for line in evaluated.lines():
            options.report(line)
        self._call("on_test_end", evaluated.numbers)

    def _call(self, moment: str, *arguments: object) -> None:
        """Call the callbacks."""
        if self._callbacks is not None:
            moment_text = f"the callbacks at step {self.state.step}, {moment}"
            with self._saving_on_error(), self._watchdog.watching(moment_text):
                getattr(self._callbacks, moment)(*arguments)

    @contextlib.contextmanager
    def _saving_on_error(self) -> Iterator[None]:
        """Save the updates so far if the `with` block fails, unless nothing can be saved."""
        try:
            yield
        except Exception as error:
            is_lost = isinstance(error, chief.LOST_ERRORS)
            if self.state.step and not (is_lost or isinstance(error, errors.CheckpointError)):
                self.state.save()
            raise


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
    has_command = shutil.which("tensorboard") is not None  # not where .venv is not activated
    program = "tensorboard" if has_command else f"{sys.executable} -m tensorboard.main"
    yield f"to see the curves: {program} --logdir {shlex.quote(str(logdir))}"
    best = checkpoints.newest(str(logdir / log_directory.BEST))
    if result.best is not None and best is not None:
        step = checkpoints.step_of(best)
        yield f"best {params.eval.best} {result.best:.4f} at step {step}: {best}"
