"""Calling the hooks of a run: which there are, when each is called, and what a failure does."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING

from lingvo_gpipe import errors, registry
from lingvo_gpipe.hooks.base import Ended, Hook, Moment

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task, Train

Metrics = Mapping[str, float]


def needing_network(train: Train) -> list[str]:
    """Return the names of the hooks that reach other hosts.

    Args:
        train: params that name the hooks of a run.

    Raises:
        UserError: a hook cannot be made.
    """
    return [named.name for named in _made(train) if named.hook.needs_network]


@dataclasses.dataclass(frozen=True, slots=True)
class _Named:
    """A hook of a run.

    Attributes:
        name: its class and where the run has it from, for messages.
        hook: the hook.
        way_out: what to set so that it does not end the run.
    """

    name: str
    hook: Hook
    way_out: str


class HookCalls:
    """The hooks of one run; the training loop calls them all through this.

    Attributes:
        stop_reason: why a hook asked for the end of the run; None: none did.
    """

    def __init__(
        self,
        params: Task.Params,
        logdir: Path,
        report: Callable[[str], None],
        watch: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        *,
        dry_run: bool = False,
    ) -> None:
        """Make the hooks.

        Args:
            params: params of the task, frozen.
            logdir: log directory of the run.
            report: receives lines for the user.
            watch: surrounds each call; receives what is being done.
            dry_run: leave out the hooks that may write elsewhere, and report their names.

        Raises:
            UserError: a hook cannot be made.
        """
        self.stop_reason: str | None = None
        self._params = params
        self._logdir = logdir
        self._report = report
        self._watch = watch
        self._wants_save = False
        self._hooks = list(_made(params.train))
        if dry_run:
            left_out = [named.name for named in self._hooks if not named.hook.in_dry_run]
            if left_out:
                report(
                    f"dry run: not called, since they may write elsewhere: {', '.join(left_out)}"
                )
            self._hooks = [named for named in self._hooks if named.hook.in_dry_run]

    def begin(self, step: int) -> None:
        """Begin at `step`; if a hook fails, those after it do not begin.

        Raises:
            HookError: a hook failed, and is not one whose failures are only logged.
        """
        hooks, self._hooks = self._hooks, []
        for named in hooks:
            self._hooks.append(named)
            self._call("begin", step, only=named)

    def after_update(self, step: int, metrics: Callable[[], Metrics]) -> None:
        """Note an update, whose metrics are read where a hook needs them; raises as `begin`."""
        self._call("after_update", step, metrics)

    def after_evaluation(self, step: int, metrics: Metrics) -> None:
        """Note an evaluation; raises as `begin`."""
        self._call("after_evaluation", step, lambda: metrics)

    def after_checkpoint(self, step: int, path: str, metrics: Metrics) -> None:
        """Note a checkpoint that is on the disk; raises as `begin`."""
        self._call("after_checkpoint", step, lambda: metrics, checkpoint=path)

    def end(self, step: int, metrics: Metrics, ended: Ended) -> None:
        """End; every hook is called, then the first failure is raised as `begin` does."""
        failures = []
        for named in list(self._hooks):
            try:
                self._call("end", step, lambda: metrics, only=named, ended=ended)
            except errors.HookError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def abort(self, step: int) -> None:
        """End because of an error, which no failure of a hook replaces."""
        for named in list(self._hooks):
            with contextlib.suppress(BrokenPipeError):
                try:
                    self._call("end", step, only=named, ended="error")
                except errors.HookError as error:
                    self._report(str(error))

    def takes_save(self) -> bool:
        """Return whether a hook asked for a checkpoint since the last call."""
        wanted, self._wants_save = self._wants_save, False
        return wanted

    def _call(
        self,
        method: str,
        step: int,
        metrics: Callable[[], Metrics] = dict,
        *,
        only: _Named | None = None,
        checkpoint: str = "",
        ended: Ended = "",
    ) -> None:
        """Call a method of all hooks, or of one."""
        for named in list(self._hooks) if only is None else [only]:
            if method == "after_update" and step % self._interval(named.hook):
                continue
            # Reported after the call: if the output's reader has ended, no hook has failed.
            lines: list[str] = []
            moment = Moment(
                step=step,
                logdir=self._logdir,
                params=self._params,
                read_metrics=metrics,
                report=lines.append,
                ask_to_save=self._ask_to_save,
                ask_to_stop=functools.partial(self._ask_to_stop, named, step, lines.append),
                checkpoint=checkpoint,
                ended=ended,
            )
            failure: errors.HookError | None = None
            try:
                with self._watch(f"{named.name}, {method} at step {step},"):
                    getattr(named.hook, method)(moment)
            except Exception as error:  # noqa: BLE001 - another's code
                failure = _failure(named, method, step, error)
            for line in lines:
                self._report(line)
            if failure is None:
                continue
            self._hooks.remove(named)
            # Raised outside of the handler: the cause may look like the loss of a worker.
            if named.hook.params.on_error == "end":
                raise failure
            self._report(f"{failure}; the run goes on without it")

    def _interval(self, hook: Hook) -> int:
        steps: int | None = hook.params.interval_steps
        return self._params.train.log_interval_steps if steps is None else steps

    def _ask_to_save(self) -> None:
        self._wants_save = True

    def _ask_to_stop(
        self, named: _Named, step: int, report: Callable[[str], None], reason: str
    ) -> None:
        if self.stop_reason is None:
            report(f"{named.name} ends the run at step {step}: {reason}")
            self.stop_reason = reason


def _failure(named: _Named, method: str, step: int, error: Exception) -> errors.HookError:
    text = f"{named.name} failed in {method} at step {step}: {_reason(error)}"
    if named.hook.params.on_error == "log":
        return errors.HookError(text)
    return errors.HookError(
        f"{text}. Correct it, or set {named.way_out}; the same command goes on from the last "
        "checkpoint"
    )


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, errors.UserError) else errors.cause(error, __file__)


def _made(train: Train) -> Iterator[_Named]:
    """Yield the hooks of a run: those of its params, then those of installed packages.

    A class that the params have is not taken from a package again.
    """
    for number, params in enumerate(train.hooks):
        place = f"train.hooks[{number}]"
        steps = params.interval_steps
        if steps is not None and steps < 1:
            raise errors.ParamsError(
                f"{place}.interval_steps={steps} is too small. Use 1 or more, or None"
            )
        name = f"hook {params.class_name()} ({place})"
        try:
            hook: Hook = params.instantiate()
        except Exception as error:
            raise errors.HookError(f"{name} cannot be made: {_reason(error)}") from error
        yield _Named(name, hook, f"{place}.on_error=log")
    if train.installed_hooks:
        yield from _installed({params.owner for params in train.hooks})


def _installed(known: Set[type | None]) -> Iterator[_Named]:
    """Yield the hooks that installed packages announce, except for known classes."""
    for point in importlib.metadata.entry_points(group=registry.HOOKS_GROUP):
        where = f"entry point {point.name} = {point.value}"
        try:
            kind = point.load()
            if not (isinstance(kind, type) and issubclass(kind, Hook)):
                raise errors.HookError(f"{point.value} is not a subclass of hooks.Hook")
            if kind in known:
                continue
            hook: Hook = kind.Params().instantiate()
        except Exception as error:
            raise errors.HookError(
                f"{where} of an installed package makes no hook: {_reason(error)}. Correct or "
                "remove the package, or set train.installed_hooks=False"
            ) from error
        name = f"hook {hook.params.class_name()} ({where})"
        yield _Named(name, hook, "train.installed_hooks=False")
