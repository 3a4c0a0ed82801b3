"""Files of checkpoints: their names, which checkpoints are whole, writing and removing them.

A checkpoint `ckpt-120` consists of TensorFlow's pair of files and the text of the run's params.
That text is written first, as `ckpt-120.writing`. It is renamed to `ckpt-120.params.txt` when
everything else is on the disk; this rename completes the checkpoint. A checkpoint that still has a
`.writing` file when a run starts was interrupted, by a kill or a full disk, and is removed.
TensorFlow's `checkpoint` file, which its tools read, is written after the rename, and at the start
if it does not agree.
A checkpoint that was damaged later is reported when it is restored, and set aside as
`ckpt-120.torn.txt`. That includes damage of its text, whose first line is a checksum of the others
(texts of earlier commits have none). A file that cannot be read for another reason, such as missing
permissions or a disk that does not answer, may be whole, and is an error instead.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import os
import re
import shutil
import zlib
from collections.abc import Iterable

import tensorflow as tf

from lingvo_gpipe import errors, regular_files
from lingvo_gpipe.hyperparams import text as params_texts

NAME = "ckpt"
_PARAMS = ".params.txt"
_WRITING = ".writing"
_TORN = ".torn.txt"
_SHARD = re.compile(r"\.data-\d{5}-of-(\d{5})")
_OURS = re.compile(rf"({NAME}-\d+)({re.escape(_PARAMS)}|{re.escape(_WRITING)}|{re.escape(_TORN)})")
_PATTERN = re.compile(r"[*?\[\\]")
_CHECKSUM = re.compile("# crc32: [0-9a-f]{8}")
_MAX_TEXT_BYTES = 4 * params_texts.MAX_TEXT_CHARS + 100  # with the checksum
# What reading a file reports that is missing, cut short, too large or not a regular one.
_DAMAGE = frozenset(
    [
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.EINVAL,
        errno.EILSEQ,
        errno.EFBIG,
        errno.EBADMSG,  # a checksum of the file system
        errno.EUCLEAN,
        None,
    ]
)


class UnreadableNowError(errors.CheckpointError):
    """A checkpoint cannot be read now, and may be whole."""


def is_damage(error: OSError) -> bool:
    """Return whether an error of reading a file says that the file itself is damaged or missing."""
    return error.errno in _DAMAGE


def unreadable_now(path: str, reason: str) -> UnreadableNowError:
    """Return the error for a file that cannot be read now, and may be whole."""
    return UnreadableNowError(
        f"{path} cannot be read now: {reason}. Nothing is set aside: start the same command again "
        "once it can be read, or move the checkpoint away to use an older one"
    )


def refuse_patterns(path: str) -> None:
    """Refuse a path of checkpoints that TensorFlow would read as a pattern.

    Raises:
        CheckpointError: the path has a character of a pattern.
    """
    if match := _PATTERN.search(path):
        raise errors.CheckpointError(
            f"{path}: TensorFlow takes {match[0]} in a path of checkpoints for a pattern, and can "
            "neither restore nor remove them. Use a path without * ? [ and \\"
        )


def find(directory: str) -> list[str]:
    """Return the prefixes of all whole checkpoints of a directory, oldest first."""
    return [prefix for prefix in find_marked(directory) if _is_whole(prefix)]


def find_marked(directory: str) -> list[str]:
    """Return the prefixes of the checkpoints that were completed, oldest first."""
    matches = [_OURS.fullmatch(name) for name in _names(directory)]
    bases = [m[1] for m in matches if m and m[2] == _PARAMS]
    return sorted((os.path.join(directory, base) for base in bases), key=step_of)


def newest(directory: str) -> str | None:
    """Return the prefix of the newest whole checkpoint of a directory, or None."""
    return next(reversed(find(directory)), None)


def at(path: str) -> str:
    """Return the prefix of the checkpoint that `path` names, or the newest in that directory.

    Raises:
        CheckpointError: there is no such checkpoint, or writing it was interrupted.
    """
    refuse_patterns(path)
    if os.path.isdir(path):
        if prefix := newest(path):
            return prefix
        below = sorted(name for name in os.listdir(path) if _has_whole(os.path.join(path, name)))
        have = "has" if len(below) == 1 else "have"
        offer = f"; {' and '.join(below)} below it {have}" if below else ""
        raise errors.CheckpointError(f"{path} has no whole checkpoint{offer}")
    prefix = path.removesuffix(".index").removesuffix(_PARAMS)
    if os.path.exists(prefix + _WRITING):
        raise errors.CheckpointError(
            f"{prefix} is torn and cannot be restored: it was cut off while being written; "
            f"{_offer(prefix)}"
        )
    if not os.path.exists(prefix + ".index"):
        raise errors.CheckpointError(f"there is no checkpoint {prefix}; {_offer(prefix)}")
    return prefix


def _has_whole(directory: str) -> bool:
    try:
        return bool(find(directory))
    except UnreadableNowError:  # such as lost+found, which belongs to the file system
        return False


def _offer(prefix: str) -> str:
    whole = find(os.path.dirname(prefix) or ".")
    return f"there are {', '.join(whole)}" if whole else "its directory has no whole one"


def step_of(prefix: str) -> int:
    """Return the number in a checkpoint's name; 0 if it has none."""
    digits = re.search(r"-(\d+)$", prefix)
    return int(digits[1]) if digits else 0


def params_text(prefix: str) -> str | None:
    """Return the params text of a checkpoint; None if it was saved without one.

    Raises:
        CheckpointError: the text is damaged, or cannot be read now.
    """
    path = prefix + _PARAMS
    try:
        text = regular_files.read_text(path, _MAX_TEXT_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not is_damage(error):
            raise unreadable_now(path, str(error.strerror)) from error
        raise errors.CheckpointError(f"{path} is damaged: {error.strerror}") from error
    first, _, rest = text.partition("\n")
    if first == _checksum_line(rest):
        return rest
    if _CHECKSUM.fullmatch(first):
        raise errors.CheckpointError(f"{path} is damaged: it does not agree with its checksum")
    lines = text.removesuffix("\n").split("\n")
    if not first.startswith("class: ") or not all(map(_is_line, lines)):
        reason = "it is not the text of Params" if text.strip() else "it is empty"
        raise errors.CheckpointError(f"{path} is damaged: {reason}")
    return text


def _is_line(line: str) -> bool:
    return ": " in line and line.isprintable()


def newest_text(directory: str) -> tuple[str, str] | None:
    """Return the prefix and the params text of the newest whole checkpoint that has one.

    Raises:
        CheckpointError: every text of the directory is damaged, which names the newest; or one
            cannot be read now.
    """
    damaged: errors.CheckpointError | None = None
    for prefix in reversed(find(directory)):
        try:
            text = params_text(prefix)
        except UnreadableNowError:
            raise
        except errors.CheckpointError as error:
            damaged = damaged or error
            continue
        if text is not None:
            return prefix, text
    if damaged is not None:
        raise damaged
    return None


def text_fault(prefix: str) -> str | None:
    """Return what is wrong with the params text of a checkpoint; None: nothing.

    Raises:
        CheckpointError: it cannot be read now.
    """
    try:
        params_text(prefix)
    except UnreadableNowError:
        raise
    except errors.CheckpointError as error:
        return str(error)
    return None


def _checksum_line(text: str) -> str:
    return f"# crc32: {zlib.crc32(text.encode()):08x}"


def size_of(prefix: str) -> int:
    """Return the bytes of a checkpoint's files."""
    directory, base = os.path.split(prefix)
    names = [name for name in _names(directory) if name.startswith(f"{base}.")]
    return sum(os.path.getsize(os.path.join(directory, name)) for name in names)


def check_regular(prefix: str) -> None:
    """Refuse a checkpoint whose index or shards are not regular files, or cannot be opened.

    TensorFlow takes an index that cannot be opened for a damaged one.

    Raises:
        OSError: one is not, or the index is missing.
    """
    directory, base = os.path.split(prefix)
    shards = [n for n in _names(directory) if _SHARD.fullmatch(n.removeprefix(base))]
    for name in (f"{base}.index", *shards):
        regular_files.open_binary(os.path.join(directory, name)).close()


def _names(directory: str) -> list[str]:
    """Return the names in a directory; none if there is no such directory.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return os.listdir(directory or ".")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnreadableNowError(
            f"{directory or '.'} cannot be read: {error.strerror}. Make it readable"
        ) from error


def _is_whole(prefix: str) -> bool:
    """Return whether the index and all shards exist."""
    directory, base = os.path.split(prefix)
    names = _names(directory)
    shards = [m for n in names if n.startswith(base) and (m := _SHARD.fullmatch(n[len(base) :]))]
    return f"{base}.index" in names and len(shards) == (int(shards[0][1]) if shards else -1)


def open_directory(directory: str) -> None:
    """Make a directory of checkpoints, or refuse one with checkpoints of another program.

    Checkpoints of another program would be overwritten or rotated out.

    Raises:
        CheckpointError: it has such a checkpoint.
        OSError: it cannot be written.
    """
    os.makedirs(directory, exist_ok=True)
    names = set(os.listdir(directory))
    for name in sorted(names):
        base = name.removesuffix(".index")
        marked = any(base + mark in names for mark in (_PARAMS, _WRITING, _TORN))
        if base != name and re.fullmatch(rf"{NAME}-\d+", base) and not marked:
            raise errors.CheckpointError(
                f"{os.path.join(directory, base)} was not written by this program: "
                f"{base}{_PARAMS} is missing. Choose another --logdir, or start from it by "
                "--checkpoint"
            )


def begin(prefix: str, text: str) -> None:
    """Write the params text of a checkpoint, which is not whole until `finish`."""
    with open(prefix + _WRITING, "w", encoding="utf-8") as file:
        file.write(f"{_checksum_line(text)}\n{text}")
        file.flush()
        os.fsync(file.fileno())


def finish(prefix: str) -> None:
    """Sync a written checkpoint to the disk, then make it visible."""
    directory, base = os.path.split(prefix)
    for name in os.listdir(directory):
        if name.startswith(f"{base}.") and not name.endswith(_WRITING):
            _sync(os.path.join(directory, name))
    _sync(directory)
    os.replace(prefix + _WRITING, prefix + _PARAMS)
    _sync(directory)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(prefix: str) -> bool:
    """Mark a checkpoint of this name, whole or torn, for `sweep`; return whether there is one."""
    marks = [mark for mark in (_PARAMS, _TORN) if os.path.exists(prefix + mark)]
    for mark in marks:
        os.replace(prefix + mark, prefix + _WRITING)
    return bool(marks)


def set_aside(prefixes: Iterable[str]) -> None:
    """Rename the files of torn checkpoints, so that they are kept but not restored."""
    for prefix in prefixes:
        os.replace(prefix + _PARAMS, prefix + _TORN)


def sweep(directory: str) -> None:
    """Remove the remains of this program's checkpoints that were interrupted or rotated out."""
    names = os.listdir(directory)
    last = max(map(step_of, find(directory)), default=-1)
    for match in [m for n in names if (m := _OURS.fullmatch(n))]:
        base, mark = match[1], match[2]
        rotated = mark == _PARAMS and f"{base}.index" not in names and step_of(base) < last
        if not (mark == _WRITING or rotated):
            continue
        files = [n for n in names if n.startswith((f"{base}.", f"{base}_temp"))]
        # The mark is removed last, so that the next sweep continues an interrupted one.
        for name in sorted(files, key=lambda n: n == match[0]):
            path = os.path.join(directory, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def repair_state(directory: str) -> None:
    """Make TensorFlow's `checkpoint` file list exactly the whole checkpoints."""
    whole = [os.path.basename(p) for p in find(directory)]
    path = os.path.join(directory, "checkpoint")
    try:
        regular_files.read(path)
    except FileNotFoundError:
        pass
    except OSError:  # a folder or a pipe, which cannot be replaced or read
        os.replace(path, f"{path}.torn")
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
    # The manager removes only checkpoints that are younger than the last preserved one.
    tf.compat.v1.train.update_checkpoint_state(
        directory,
        model_checkpoint_path=whole[-1],
        all_model_checkpoint_paths=whole,
        all_model_checkpoint_timestamps=[float(n + 2) for n in range(len(whole))],
        last_preserved_timestamp=1.0,
    )


def keep_only(prefix: str, directory: str) -> None:
    """Make a whole checkpoint the only one of another directory, without a second copy on disk.

    Args:
        prefix: prefix of the files; the run that wrote them may remove them at any time.
        directory: created if it is missing.

    Raises:
        CheckpointError: the checkpoint is gone, its text is damaged, or it cannot be written there.
    """
    base = os.path.basename(prefix)
    target = os.path.join(directory, base)
    text = params_text(prefix) or ""
    try:
        os.makedirs(directory, exist_ok=True)
        if os.path.exists(target + _PARAMS):
            if _is_whole(target) and filecmp.cmp(f"{prefix}.index", f"{target}.index", False):
                return  # an index holds a checksum of each tensor
            os.replace(target + _PARAMS, target + _WRITING)
        sweep(directory)
        begin(target, text)
        for name in _names(os.path.dirname(prefix)):
            if name.startswith((f"{base}.index", f"{base}.data")):
                _link(os.path.join(os.path.dirname(prefix), name), os.path.join(directory, name))
        if not _is_whole(target):
            raise FileNotFoundError(2, "its files have been removed")
        finish(target)
        for other in {*find(directory)} - {target}:
            os.replace(other + _PARAMS, other + _WRITING)
        sweep(directory)
        repair_state(directory)
    except OSError as error:
        with contextlib.suppress(OSError):
            sweep(directory)
        raise errors.CheckpointError(
            f"{prefix} cannot be kept in {directory}: {error.strerror}. Raise "
            "train.keep_checkpoints where training removes it too early"
        ) from error


def _link(source: str, target: str) -> None:
    """Make a second name of a file, or copy it if the file system has no links."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(target)  # what is written to one of two names is written to both
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def free_space(directory: str) -> str:
    """Return the free space on the disk of a directory, for a message."""
    try:
        return f"{shutil.disk_usage(directory).free / 2**20:.0f} MiB"
    except OSError:
        return "unknown"
