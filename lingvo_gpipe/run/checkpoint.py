"""Checkpoints: complete or invisible, named by paths alone, refused where they do not fit.

A checkpoint `ckpt-120` is TensorFlow's own pair of files and the text of the run's params. That
text is written first, as `ckpt-120.writing`, and renamed to `ckpt-120.params.txt` when everything
else is on the disk: the rename makes the checkpoint. Whatever still has a `.writing` file when a
run starts was cut off, by a kill or a full disk, and is swept. TensorFlow's `checkpoint` file,
which its tools read, is written after the rename and made anew at the start if it does not agree.
One that was damaged later is told when it is restored, and set aside as `ckpt-120.torn.txt`.

Keys are paths of variables, names of slots and a few scalars; no cell, device or schedule is in
them, so a checkpoint restores at any partition.
"""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors

_NAME = "ckpt"
_PARAMS = ".params.txt"
_WRITING = ".writing"
_TORN = ".torn.txt"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_SHARD = re.compile(r"\.data-\d{5}-of-(\d{5})")
_OURS = re.compile(rf"({_NAME}-\d+)({re.escape(_PARAMS)}|{re.escape(_WRITING)}|{re.escape(_TORN)})")
_PATTERN = re.compile(r"[*?\[\\]")
# What TensorFlow raises for a file that is cut off, missing or not one of its own.
_UNREADABLE = (tf.errors.OpError, RuntimeError, ValueError, IndexError)


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """What was restored.

    Attributes:
        path: prefix of the checkpoint's files.
        step: its number.
        torn: newer ones that could not be read: their prefix and why.
    """

    path: str
    step: int
    torn: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Matched:
    """What a partial restore did.

    Attributes:
        restored: keys that have their saved values now.
        missing: keys that the checkpoint does not have.
        unfit: keys saved with another shape or dtype, each with a line that says so.
    """

    restored: tuple[str, ...]
    missing: tuple[str, ...]
    unfit: Mapping[str, str]


class Checkpoints:
    """The checkpoints of one run in one directory.

    Attributes:
        directory: where they lie.
    """

    def __init__(
        self,
        directory: str,
        objects: Mapping[str, Any],
        params_text: str = "",
        *,
        keep: int = 3,
        read_only: bool = False,
    ) -> None:
        """Open a directory, sweeping what an interrupted run left there.

        Args:
            directory: created where it is missing, unless `read_only`.
            objects: key → `tf.Variable` (or other trackable, such as a `tf.data` iterator).
            params_text: stored beside each checkpoint.
            keep: how many are kept, newest first.
            read_only: nothing is created, swept or saved: another run writes here.

        Raises:
            CheckpointError: the directory cannot be written, or has another program's checkpoints.
        """
        refuse_patterns(directory)
        self.directory = directory
        self._objects = dict(objects)
        self._params_text = params_text
        self._checkpoint = tf.train.Checkpoint(**self._objects)
        self._keep = keep
        self._manager: tf.train.CheckpointManager | None = None
        self._present: str | None = None
        if read_only:
            return
        try:
            os.makedirs(directory, exist_ok=True)
            _refuse_strangers(directory)
            self._tidy()
        except OSError as error:
            raise errors.CheckpointError(
                f"{directory}: checkpoints cannot be written here: {error.strerror}. Choose "
                "another --logdir, or mend its permissions"
            ) from error

    def save(self, step: int) -> str:
        """Save under the number `step`; return the prefix of the files.

        Saving the step that was just saved or restored does nothing.

        Raises:
            CheckpointError: it cannot be written; older ones are kept.
        """
        if self._manager is None:
            raise errors.CheckpointError(f"{self.directory} was opened read-only: nothing is saved")
        prefix = os.path.join(self.directory, f"{_NAME}-{step}")
        if prefix == self._present:
            return prefix
        try:
            for mark in (_PARAMS, _TORN):
                if os.path.exists(prefix + mark):
                    os.replace(prefix + mark, prefix + _WRITING)
                    self._tidy()
            _write_synced(prefix + _WRITING, self._params_text)
            options = tf.train.CheckpointOptions(
                experimental_write_callbacks=[lambda path: _finish(path)]
            )
            self._manager.save(checkpoint_number=step, options=options)
            _sweep(self.directory)
        except (OSError, tf.errors.OpError) as error:
            with contextlib.suppress(OSError):
                _sweep(self.directory)
            whole = find(self.directory)
            last = f"the last whole one is {whole[-1]}" if whole else "there is no older one"
            raise errors.CheckpointError(
                f"{prefix}: checkpoint cannot be written ({_reason(error)}); {last}. Free disk "
                f"space ({_free(self.directory)} free), then start the same command again"
            ) from error
        self._present = prefix
        return prefix

    def restore(self, which: int | str | None = None, *, subset: bool = False) -> Restored | None:
        """Give all objects their saved values.

        Args:
            which: a step of this directory, the path of a checkpoint or of a directory of them,
                or None: the newest of this directory.
            subset: the objects are only some of what was saved (evaluation has no slots).

        Returns:
            What was restored; None where `which` is None and the directory has no checkpoint.
            With `which` None, newer ones that are torn are skipped and told.

        Raises:
            CheckpointError: there is no such checkpoint, it is torn, or another network's.
        """
        candidates = self._candidates(which)
        torn: list[tuple[str, str]] = []
        for prefix in candidates:
            try:
                self._check(prefix, subset=subset)
                # A fresh one: a read that fails leaves restorations pending on its object.
                tf.train.Checkpoint(**self._objects).read(prefix).expect_partial()
            except errors.CheckpointError:
                raise
            except _UNREADABLE as error:
                torn.append((prefix, _reason(error)))
                continue
            inside = os.path.dirname(os.path.abspath(prefix)) == os.path.abspath(self.directory)
            self._present = prefix if inside and not subset else None
            if torn and self._manager is not None:
                self._set_aside(p for p, _ in torn)
            return Restored(prefix, step_of(prefix), tuple(torn))
        if not torn:
            return None
        prefix, reason = torn[0]
        others = [p for p in find(os.path.dirname(prefix)) if p not in dict(torn)]
        way_out = f"whole ones: {', '.join(others)}" if others else "no other is left"
        raise errors.CheckpointError(
            f"{prefix} is torn and cannot be restored: {reason}; {way_out}"
        )

    def restore_matching(
        self, path: str, names: Mapping[str, Sequence[str]] | None = None
    ) -> Matched:
        """Give those objects their saved values that fit, for a start from another network.

        Args:
            path: of a checkpoint, or of a directory of them (the newest).
            names: key here → keys in the checkpoint, of which the first that is there is taken;
                keys that are not given keep their name. Without any, a key is left alone.

        Raises:
            CheckpointError: there is no such checkpoint, or it is torn.
        """
        (prefix, *_) = self._candidates(path)
        restored, missing, unfit = [], [], {}
        try:
            reader = tf.train.load_checkpoint(prefix)
            shapes, dtypes = _saved(reader)
            for key, variable in self._objects.items():
                sources = (names or {}).get(key, (key,))
                if not sources or not isinstance(variable, tf.Variable):
                    continue
                source = next((name for name in sources if name in shapes), None)
                if source is None:
                    missing.append(key)
                elif fault := _misfit(key, variable, shapes[source], dtypes[source]):
                    unfit[key] = fault
                else:
                    variable.assign(reader.get_tensor(_escape(source) + _SUFFIX))
                    restored.append(key)
        except _UNREADABLE as error:
            raise errors.CheckpointError(
                f"{prefix} is torn and cannot be restored: {_reason(error)}; choose another one"
            ) from error
        return Matched(tuple(restored), tuple(missing), unfit)

    def _candidates(self, which: int | str | None) -> list[str]:
        """Return the prefixes to try, newest first."""
        if which is None:
            return _marked(self.directory)[::-1]
        if isinstance(which, int):
            which = os.path.join(self.directory, f"{_NAME}-{which}")
        refuse_patterns(which)
        if os.path.isdir(which):
            if found := find(which):
                return found[:-2:-1]
            below = sorted(name for name in os.listdir(which) if find(os.path.join(which, name)))
            offer = f"; {' and '.join(below)} below it has" if below else ""
            raise errors.CheckpointError(f"{which} has no whole checkpoint{offer}")
        prefix = which.removesuffix(".index").removesuffix(_PARAMS)
        if os.path.exists(prefix + _WRITING):
            raise errors.CheckpointError(
                f"{prefix} is torn and cannot be restored: it was cut off while being written; "
                f"{_offer(prefix)}"
            )
        if not os.path.exists(prefix + ".index"):
            raise errors.CheckpointError(f"there is no checkpoint {prefix}; {_offer(prefix)}")
        return [prefix]

    def _check(self, prefix: str, *, subset: bool) -> None:
        """Refuse a checkpoint whose keys, shapes or dtypes are not those of the objects."""
        shapes, dtypes = _saved(tf.train.load_checkpoint(prefix))
        variables = {k: v for k, v in self._objects.items() if isinstance(v, tf.Variable)}
        opaque = tuple(f"{k}/" for k in self._objects if k not in variables)
        missing = [k for k in variables if k not in shapes]
        extra = [k for k in shapes if k not in variables and not k.startswith(opaque)]
        faults = [
            fault
            for k, v in variables.items()
            if k in shapes and (fault := _misfit(k, v, shapes[k], dtypes[k]))
        ]
        if subset:
            extra = []
        if not (missing or extra or faults):
            return
        told = [f"{len(faults)} differ ({_some(faults)})"] if faults else []
        told += [f"{len(missing)} are missing in it ({_some(missing)})"] if missing else []
        told += [f"{len(extra)} are not in this network ({_some(extra)})"] if extra else []
        raise errors.CheckpointError(
            f"{prefix} is of another network: {'; '.join(told)}. Give another --logdir, or the "
            "model and params it was written with"
        )

    def _tidy(self) -> None:
        """Sweep, make TensorFlow's state agree with what is whole, and begin from there."""
        _sweep(self.directory)
        _repair_state(self.directory)
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, self.directory, max_to_keep=self._keep, checkpoint_name=_NAME
        )

    def _set_aside(self, prefixes: Iterable[str]) -> None:
        """Keep the files of torn checkpoints, but not among those that can be restored."""
        for prefix in prefixes:
            os.replace(prefix + _PARAMS, prefix + _TORN)
        self._tidy()


class Best:
    """Keeps the checkpoint with the best value of a metric in a directory of its own.

    Attributes:
        objects: best value and misses since, to be saved with the run's own checkpoints.
    """

    def __init__(
        self,
        directory: str,
        objects: Mapping[str, Any],
        params_text: str = "",
        *,
        larger_is_better: bool = True,
    ) -> None:
        """Open the directory of the best checkpoint.

        Args:
            directory: its own, such as `best` in the log directory.
            objects: as in `Checkpoints`.
            params_text: as in `Checkpoints`.
            larger_is_better: False for losses.
        """
        self._params_text = params_text
        self._sign = 1.0 if larger_is_better else -1.0
        with tf.device("CPU:0"):
            self._value = tf.Variable(-math.inf * self._sign, dtype=tf.float64)
            self._misses = tf.Variable(0, dtype=tf.int64)
        self.objects = {"best/value": self._value, "best/misses": self._misses}
        self._checkpoints = Checkpoints(directory, {**objects, **self.objects}, params_text, keep=1)

    @property
    def value(self) -> float:
        """The best value so far; infinite before the first."""
        return float(self._value.numpy())

    @property
    def misses(self) -> int:
        """Values since the best one: compare with the patience of early stopping."""
        return int(self._misses.numpy())

    def consider(self, value: float, step: int) -> bool:
        """Save if `value` is better than all before (not a number never is); tell whether."""
        if not value * self._sign > self.value * self._sign:
            self._misses.assign_add(1)
            return False
        self._value.assign(value)
        self._misses.assign(0)
        # Writing it anew would remove the only one first.
        if not self._is_kept(step):
            self._checkpoints.save(step)
        return True

    def _is_kept(self, step: int) -> bool:
        """Tell whether a run that was cut off after `step` has kept it, with the same value."""
        whole = find(self._checkpoints.directory)[-1:]
        if not whole or step_of(whole[0]) != step or params_text(whole[0]) != self._params_text:
            return False
        with contextlib.suppress(errors.CheckpointError):
            return bool(read_value(whole[0], "best/value") == self.value)
        return False


def refuse_patterns(path: str) -> None:
    """Refuse a path of checkpoints that TensorFlow would take for a pattern of paths.

    Raises:
        CheckpointError: one of its characters is a pattern's.
    """
    if found := _PATTERN.search(path):
        raise errors.CheckpointError(
            f"{path}: TensorFlow takes {found[0]} in a path of checkpoints for a pattern, and can "
            "neither restore nor remove them. Use a path without * ? [ and \\"
        )


def find(directory: str) -> list[str]:
    """Return the prefixes of all whole checkpoints of a directory, oldest first."""
    return [p for p in _marked(directory) if _is_whole(p)]


def keep_only(prefix: str, directory: str) -> None:
    """Make a whole checkpoint the only one of another directory, without a second copy on disk.

    Args:
        prefix: of the checkpoint's files, which may be removed meanwhile by who wrote them.
        directory: made where it is missing.

    Raises:
        CheckpointError: it is gone, or cannot be written there.
    """
    base = os.path.basename(prefix)
    target = os.path.join(directory, base)
    try:
        os.makedirs(directory, exist_ok=True)
        if os.path.exists(target + _PARAMS):
            if _is_whole(target) and filecmp.cmp(f"{prefix}.index", f"{target}.index", False):
                return  # an index holds a checksum of each tensor
            os.replace(target + _PARAMS, target + _WRITING)
        _sweep(directory)
        _write_synced(target + _WRITING, params_text(prefix) or "")
        for name in _names(os.path.dirname(prefix)):
            if name.startswith((f"{base}.index", f"{base}.data")):
                _link(os.path.join(os.path.dirname(prefix), name), os.path.join(directory, name))
        if not _is_whole(target):
            raise FileNotFoundError(2, "its files have been removed")
        _finish(target)
        for other in {*find(directory)} - {target}:
            os.replace(other + _PARAMS, other + _WRITING)
        _sweep(directory)
        _repair_state(directory)
    except OSError as error:
        with contextlib.suppress(OSError):
            _sweep(directory)
        raise errors.CheckpointError(
            f"{prefix} cannot be kept in {directory}: {error.strerror}. Raise "
            "train.keep_checkpoints where training removes it too early"
        ) from error


def _link(source: str, target: str) -> None:
    """Give a file a second name, or copy it where the file system has none."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(target)  # what is written to one of two names is written to both
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def step_of(prefix: str) -> int:
    """Return the number in a checkpoint's name; 0 where it has none."""
    digits = re.search(r"-(\d+)$", prefix)
    return int(digits[1]) if digits else 0


def params_text(prefix: str) -> str | None:
    """Return the params text stored beside a checkpoint; None where there is none."""
    try:
        with open(prefix + _PARAMS, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None


def read_value(prefix: str, key: str) -> Any:
    """Return one saved value as a numpy array, without restoring anything.

    Raises:
        CheckpointError: the checkpoint does not have `key`, or is torn.
    """
    try:
        reader = tf.train.load_checkpoint(prefix)
        shapes, _ = _saved(reader)
        if key in shapes:
            return reader.get_tensor(_escape(key) + _SUFFIX)
    except _UNREADABLE as error:
        raise errors.CheckpointError(f"{prefix} is torn: {_reason(error)}") from error
    near = errors.nearest(key, shapes) or sorted(shapes)[:3]
    raise errors.CheckpointError(f"{prefix} has no {key!r}; nearest {', '.join(near)}")


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory or ".")
    except (FileNotFoundError, NotADirectoryError):
        return []


def _marked(directory: str) -> list[str]:
    """Return the prefixes of the checkpoints that were whole once, oldest first."""
    matches = [_OURS.fullmatch(name) for name in _names(directory)]
    bases = [m[1] for m in matches if m and m[2] == _PARAMS]
    return sorted((os.path.join(directory, base) for base in bases), key=step_of)


def _is_whole(prefix: str) -> bool:
    """Tell whether index and all shards are there."""
    directory, base = os.path.split(prefix)
    names = _names(directory)
    shards = [m for n in names if n.startswith(base) and (m := _SHARD.fullmatch(n[len(base) :]))]
    return f"{base}.index" in names and len(shards) == (int(shards[0][1]) if shards else -1)


def _refuse_strangers(directory: str) -> None:
    """Refuse a directory with checkpoints that would be overwritten or rotated out."""
    names = set(os.listdir(directory))
    for name in sorted(names):
        base = name.removesuffix(".index")
        marked = any(base + mark in names for mark in (_PARAMS, _WRITING, _TORN))
        if base != name and re.fullmatch(rf"{_NAME}-\d+", base) and not marked:
            raise errors.CheckpointError(
                f"{os.path.join(directory, base)} is not of this program: {base}{_PARAMS} is "
                "missing beside it. Choose another --logdir, or start from it by --checkpoint"
            )


def _sweep(directory: str) -> None:
    """Remove what is left of checkpoints of ours that were cut off or rotated out."""
    names = os.listdir(directory)
    newest = max(map(step_of, find(directory)), default=-1)
    for match in [m for n in names if (m := _OURS.fullmatch(n))]:
        base, mark = match[1], match[2]
        rotated = mark == _PARAMS and f"{base}.index" not in names and step_of(base) < newest
        if not (mark == _WRITING or rotated):
            continue
        own = [n for n in names if n.startswith((f"{base}.", f"{base}_temp"))]
        # The mark goes last: a sweep that is cut off is taken up by the next.
        for name in sorted(own, key=lambda n: n == match[0]):
            path = os.path.join(directory, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def _repair_state(directory: str) -> None:
    """Make TensorFlow's `checkpoint` file name exactly the whole checkpoints."""
    whole = [os.path.basename(p) for p in find(directory)]
    path = os.path.join(directory, "checkpoint")
    try:
        state = tf.train.get_checkpoint_state(directory)
        listed = [os.path.basename(p) for p in state.all_model_checkpoint_paths] if state else []
    except (tf.errors.OpError, ValueError):
        listed = ["?"]
    if listed == whole:
        return
    if not whole:
        os.remove(path)
        return
    # The manager follows those alone that are younger than the last one preserved for ever.
    tf.compat.v1.train.update_checkpoint_state(
        directory,
        model_checkpoint_path=whole[-1],
        all_model_checkpoint_paths=whole,
        all_model_checkpoint_timestamps=[float(n + 2) for n in range(len(whole))],
        last_preserved_timestamp=1.0,
    )


def _finish(prefix: str) -> None:
    """Bring a written checkpoint to the disk, then make it visible."""
    directory, base = os.path.split(prefix)
    for name in os.listdir(directory):
        if name.startswith(f"{base}.") and not name.endswith(_WRITING):
            _sync(os.path.join(directory, name))
    _sync(directory)
    os.replace(prefix + _WRITING, prefix + _PARAMS)
    _sync(directory)


def _write_synced(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _escape(key: str) -> str:
    """Return `key` as TensorFlow writes an attribute's name."""
    return key.replace(".", "..").replace("/", ".S")


def _saved(reader: Any) -> tuple[dict[str, list[int]], dict[str, tf.DType]]:
    """Return shapes and dtypes of what a checkpoint holds, by key."""
    shapes, dtypes = {}, {}
    types = reader.get_variable_to_dtype_map()
    for name, shape in reader.get_variable_to_shape_map().items():
        if name.endswith(_SUFFIX) and name != f"save_counter{_SUFFIX}":
            parts = name.removesuffix(_SUFFIX).split("..")
            key = ".".join(part.replace(".S", "/") for part in parts)
            shapes[key], dtypes[key] = list(shape), tf.as_dtype(types[name])
    return shapes, dtypes


def _misfit(key: str, variable: tf.Variable, shape: list[int], dtype: tf.DType) -> str | None:
    here = f"{variable.dtype.name}{variable.shape.as_list()}"
    there = f"{dtype.name}{shape}"
    return None if here == there else f"{key} is {there} there, {here} here"


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _offer(prefix: str) -> str:
    whole = find(os.path.dirname(prefix) or ".")
    return f"there are {', '.join(whole)}" if whole else "its directory has no whole one"


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or getattr(error, "message", None) or str(error)
    return str(text).strip().splitlines()[0].rstrip(".") if str(text).strip() else repr(error)


def _free(directory: str) -> str:
    try:
        return f"{shutil.disk_usage(directory).free / 2**20:.0f} MiB"
    except OSError:
        return "unknown"
