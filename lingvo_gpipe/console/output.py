"""What a command prints for its user, and how it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable

import tqdm

from lingvo_gpipe import errors


def quiet_tensorflow(level: str) -> None:
    """Turn down what TensorFlow logs about itself; call it before TensorFlow is imported.

    Args:
        level: of its C++ code, where `TF_CPP_MIN_LOG_LEVEL` is not set: "2" logs errors, "3" only
            fatal ones. Its Python code logs errors.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", level)
    logging.getLogger("tensorflow").setLevel(logging.ERROR)


def report(line: str) -> None:
    """Print a line for the user, above a progress bar; lose it where a disk is full.

    Raises:
        BrokenPipeError: the reader of the output has ended.
    """
    encoding = sys.stdout.encoding or "utf-8"
    shown = line.encode(encoding, "backslashreplace").decode(encoding)
    try:
        tqdm.tqdm.write(shown, file=sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:
        return


def note(line: str) -> None:
    """Print a line beside the program's output, on the standard error, or lose it."""
    with contextlib.suppress(OSError):
        tqdm.tqdm.write(line, file=sys.stderr)


def exit_code(work: Callable[[], int]) -> int:
    """Do the work of a command; return its exit code.

    It is 1 after a user's mistake, which is printed on one line; 128 + SIGPIPE if the output's
    reader ends (head, a pager); 130 after Ctrl-C. A bug keeps its traceback.
    """
    try:
        try:
            code = work()
        except errors.UserError as error:
            sys.stderr.write(f"{mistake(error)}\n")
            code = 1
        except SystemExit as end:  # help was printed
            if end.code:
                raise
            code = 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python would fail again to write the rest of the output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def mistake(error: errors.UserError) -> str:
    """Return the line for a user's mistake: the name of its class in errors.py, and its text."""
    kinds = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return f"{next(kinds).__name__}: {error}"
