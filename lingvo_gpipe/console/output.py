"""Lines that a command prints for its user."""

from __future__ import annotations

import contextlib
import logging
import os
import sys


def quiet_tensorflow(level: str) -> None:
    """Turn down what TensorFlow logs about itself; call it before TensorFlow is imported.

    Args:
        level: of its C++ code, where `TF_CPP_MIN_LOG_LEVEL` is not set: "2" logs errors, "3" only
            fatal ones. Its Python code logs errors.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", level)
    logging.getLogger("tensorflow").setLevel(logging.ERROR)


def report(line: str) -> None:
    r"""Print a line for the user, above a progress bar.

    A full disk under the output does not end the work: the line is written later, or lost. A
    character that the output's encoding lacks, such as a path's byte that is not UTF-8, is printed
    as `\udcff`.

    Raises:
        BrokenPipeError: the reader of the output has ended.
    """
    import tqdm

    encoding = sys.stdout.encoding or "utf-8"
    try:
        tqdm.tqdm.write(line.encode(encoding, "backslashreplace").decode(encoding), file=sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:
        return


def note(line: str) -> None:
    """Print a line beside the program's output, on the standard error, or lose it."""
    import tqdm

    with contextlib.suppress(OSError):
        tqdm.tqdm.write(line, file=sys.stderr)


def finish() -> bool:
    """Flush the output; return whether it could be written, which a full disk prevents.

    Raises:
        BrokenPipeError: the reader of the output has ended.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop()
        note(f"the end of the output cannot be written: {error.strerror}")
        return False
    return True


def drop() -> None:
    """Discard the rest of the output: Python would fail again to write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
