"""One model trained several times: from several seeds, and with every setting of a grid.

    python -m lingvo_gpipe.repeat --seeds=1,2,3,4,5 -- --model=image.digits.MLP --logdir=runs/five
    python -m lingvo_gpipe.repeat --sweep=train.accumulate=1,2 -- --model=NAME --logdir=runs/grid

All flags after `--` are the trainer's. It runs once for each setting and seed, with
--mode=train_eval, in a process of its own and in a folder below LOGDIR. The same command continues
runs that were cut off and leaves out those that are done. TensorBoard's HParams page compares all
of them: --logdir=LOGDIR.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import itertools
import json
import re
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2, summary_v2
from tensorboard.summary.writer import record_writer

from lingvo_gpipe import errors, trainer
from lingvo_gpipe.console import output, signals, units
from lingvo_gpipe.console.flags import Flags

_TRAINER = (sys.executable, "-m", "lingvo_gpipe.trainer")
_USAGE = "python -m lingvo_gpipe.repeat --seeds=1,2,3 -- --model=NAME --logdir=FOLDER"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One run of the trainer.

    Attributes:
        setting: short name of each swept field → its value, as an override writes it.
        seed: its seed.
        logdir: folder of all runs.
        flags: flags of the trainer, without its seed and its own log directory.
    """

    setting: Mapping[str, str]
    seed: str
    logdir: Path
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its folder below that of all runs."""
        folders = [re.sub(r"[^\w.+\-=]+", "_", f"{n}={v}")[:100] for n, v in self.setting.items()]
        return "/".join([*folders, f"seed_{self.seed}"])

    @property
    def folder(self) -> Path:
        """Its log directory."""
        return self.logdir / self.name

    def check(self) -> None:
        """Refuse a folder whose run was finished with other flags, which would be taken for this.

        Raises:
            ParamsError: it was.
        """

        def meaning(flags: Sequence[str]) -> dict[str, object]:
            found = vars(trainer.read_flags(flags))
            return {**found, "logdir": None, "max_steps": None}  # a run may go on

        try:
            finished = json.loads((self.folder / "repeat.json").read_text())
        except (OSError, json.JSONDecodeError):  # it was not finished
            return
        if meaning(finished) != meaning(self.flags):
            raise errors.ParamsError(
                f"{self.folder} holds a run with other flags: {shlex.join(finished)}. Give another "
                "--logdir"
            )

    def metrics(self) -> dict[str, float] | None:
        """Return its last evaluation; None: it was not finished with these flags."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if json.loads((self.folder / "repeat.json").read_text()) == list(self.flags):
                result = json.loads((self.folder / "result.json").read_text())
                return {name: float(value) for name, value in result["metrics"].items()}
        return None

    def train(self, program: Sequence[str]) -> int:
        """Run the trainer; return its exit code, or 128 + the signal that this process received."""
        own = ("--mode=train_eval", f"--seed={self.seed}", f"--logdir={self.folder}")
        output.report(f"{self.name}: {shlex.join([*self.flags, *own])}")
        self.folder.mkdir(parents=True, exist_ok=True)
        hparams = {
            **{name: _number(text) for name, text in self.setting.items()},
            "seed": self.seed,
        }
        begun = summary_v2.hparams_pb(hparams, trial_id=self.name, start_time_secs=time.time())
        _write_events(self.folder, begun)
        code, received = signals.run_program([*program, *self.flags, *own])
        code = 128 - code if code < 0 else code  # as a shell reports a signal
        status = api_pb2.STATUS_FAILURE if code else api_pb2.STATUS_SUCCESS
        _write_events(self.folder, begun, _session_end(status))
        if code == 0:
            (self.folder / "repeat.json").write_text(json.dumps(list(self.flags)))
        return code if received is None else 128 + received


def run(argv: Sequence[str], program: Sequence[str] = _TRAINER) -> int:
    """Do what the arguments `argv` ask; return the exit code.

    Args:
        argv: arguments without the program's name.
        program: the trainer.
    """
    return output.exit_code(lambda: _run(list(argv), program))


def _run(arguments: list[str], program: Sequence[str]) -> int:
    place = arguments.index("--") if "--" in arguments else len(arguments)
    own, of_trainer = flags().read(arguments[:place]), arguments[place + 1 :]
    if not of_trainer:
        raise errors.ParamsError(f"the trainer's flags are missing after --. Write {_USAGE}")
    given = trainer.read_flags(of_trainer)
    if given.logdir is None:
        raise errors.ParamsError(f"--logdir=FOLDER is missing after --. Write {_USAGE}")
    if given.seed is not None or given.mode is not None:
        raise errors.ParamsError("each run has its own --seed and --mode. Leave them out after --")
    if any(text.startswith("model.seed") for text in given.params_override):
        raise errors.ParamsError(
            "model.seed would be that of all runs. Name the seeds: --seeds=1,2"
        )
    logdir = Path(given.logdir).expanduser()
    runs = _runs(_axes(own.sweep), _seeds(own.seeds), logdir, of_trainer)
    for each in runs:
        each.check()
    try:
        for each in runs:
            code = 0 if each.metrics() else each.train(program)
            if code - 128 in signals.ENDING:
                return code
            if not each.metrics():
                output.note(f"{each.name} failed with exit code {code}, or evaluated nothing")
    except OSError as error:
        raise errors.TrainingError(
            f"{error.filename} cannot be written: {error.strerror}. Give another --logdir, or "
            "correct its permissions"
        ) from error
    results = {each: metrics for each in runs if (metrics := each.metrics())}
    output.report(f"to compare the runs: tensorboard --logdir {shlex.quote(str(logdir))}, HParams")
    output.report(table(results))
    return int(len(results) < len(runs))


def flags() -> Flags:
    """Return the flags before `--`."""
    flags = Flags(f"{__doc__}")
    flags.text("seeds", "Seeds of the runs, between commas; 1 if not given.")
    flags.repeated("sweep", "A field and its values, PATH=VALUE,VALUE; several make a grid.")
    return flags


def _seeds(text: str | None) -> list[str]:
    seeds = [part.strip() for part in (text or "1").split(",")]
    if not all(map(str.isdecimal, seeds)) or len(set(map(int, seeds))) < len(seeds):
        raise errors.ParamsError(f"--seeds={text} are not different whole numbers. Write {_USAGE}")
    return seeds


def _axes(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return path → values of the fields that --sweep names.

    >>> _axes(["model.cuts=(1, 2),(1, 3)", "model.schedule=gpipe,1f1b"])
    {'model.cuts': ['(1, 2)', '(1, 3)'], 'model.schedule': ['gpipe', '1f1b']}
    """
    axes: dict[str, list[str]] = {}
    for text in texts:
        path, _, rest = text.partition("=")
        try:  # commas inside brackets and quotes belong to a value
            listed = ast.parse(f"[{rest}]", mode="eval").body
            values = listed.elts if isinstance(listed, ast.List) else []
            parts = [ast.get_source_segment(f"[{rest}]", value) or "" for value in values]
        except SyntaxError:
            parts = [part.strip() for part in rest.split(",")]
        if not (path and parts and all(parts)) or path in axes or path == "model.seed":
            raise errors.ParamsError(
                f"--sweep={text} is not a path, given once, and its values. Write "
                "--sweep=train.optimizer.learning_rate=1e-3,3e-3; seeds are --seeds"
            )
        axes[path] = parts
    return axes


def _runs(
    axes: Mapping[str, Sequence[str]], seeds: Sequence[str], logdir: Path, flags: Sequence[str]
) -> list[Run]:
    """Return the runs of all combinations of values and seeds."""
    # As few of the last parts of each path as make all names different.
    for count in range(1, 99):
        names = [".".join(path.split(".")[-count:]) for path in axes]
        if len(set(names)) == len(names):
            break
    runs = []
    for *values, seed in itertools.product(*axes.values(), seeds):
        overrides = map("--params_override={}={}".format, axes, values)
        runs.append(Run(dict(zip(names, values, strict=True)), seed, logdir, (*flags, *overrides)))
    folders = [each.name for each in runs]
    if twice := next((name for name in folders if folders.count(name) > 1), None):
        raise errors.ParamsError(f"--sweep: two settings would share the folder {twice}")
    return runs


def _number(text: str) -> float | str:
    """Return the number that a value is, or its text."""
    try:
        return float(text)
    except ValueError:
        return text


def table(results: Mapping[Run, Mapping[str, float]]) -> str:
    """Return a line per run, and after several seeds of a setting mean ± sample deviation.

    >>> runs = _runs({"train.accumulate": "2"}, "13", Path(), [])
    >>> print(table({run: {"accuracy": float(run.seed) / 10} for run in runs}))
    accumulate  seed         accuracy
    2           1              0.1000
    2           3              0.3000
    2           mean  0.2000 ± 0.1414
    """
    if not results:
        return "no run was finished"
    metrics = [n for n in next(iter(results.values())) if all(n in r for r in results.values())]
    names = list(next(iter(results)).setting)
    rows = [[*names, "seed", *metrics]]
    for values, group in itertools.groupby(results, lambda each: list(each.setting.values())):
        runs = list(group)
        for each in runs:
            rows.append([*values, each.seed, *(f"{results[each][n]:.4f}" for n in metrics)])
        if len(runs) > 1:
            columns = [[results[each][name] for each in runs] for name in metrics]
            means = [f"{statistics.fmean(c):.4f} ± {statistics.stdev(c):.4f}" for c in columns]
            rows.append([*values, "mean", *means])
    return "\n".join(units.table(rows, "l" * (len(names) + 1) + "r" * len(metrics)))


def _session_end(status: int) -> summary_pb2.Summary:
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    data = plugin_data_pb2.HParamsPluginData(session_end_info=end)
    about = metadata.create_summary_metadata(data)
    value = summary_pb2.Summary.Value(
        tag=metadata.SESSION_END_INFO_TAG, metadata=about, tensor=metadata.NULL_TENSOR
    )
    return summary_pb2.Summary(value=[value])


def _write_events(folder: Path, *summaries: summary_pb2.Summary) -> None:
    """Replace the file that TensorBoard's HParams page reads."""
    events = [event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")]
    events += [event_pb2.Event(wall_time=time.time(), summary=each) for each in summaries]
    path = folder / "events.out.tfevents.0.hparams"
    with contextlib.closing(record_writer.RecordWriter(path.open("wb"))) as file:
        for event in events:
            file.write(event.SerializeToString())


def main() -> None:
    """Run the command line's arguments and end the process."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
