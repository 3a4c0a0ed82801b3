"""How a command ends: its exit code, and one line for a user's mistake."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable

from lingvo_gpipe import errors
from lingvo_gpipe.console import output


@dataclasses.dataclass(frozen=True, slots=True)
class Exit:
    """How the work of a command ended.

    Attributes:
        code: exit code.
        output_required: the output is the command's result, so that losing its end is a failure.
    """

    code: int = 0
    output_required: bool = True


def exit_code(work: Callable[[], Exit]) -> int:
    """Do the work of a command; return its exit code.

    It is 1 after a user's mistake, which is printed on one line, or if the output cannot be
    written; 128 + SIGPIPE if the output's reader ends (head, a pager); 130 after Ctrl-C. A bug
    keeps its traceback.
    """
    try:
        try:
            end = work()
        except errors.UserError as error:
            sys.stderr.write(f"{mistake(error)}\n")
            end = Exit(1)
        lost = not output.finish()
        return end.code or int(lost and end.output_required)
    except BrokenPipeError:
        output.drop()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def mistake(error: errors.UserError) -> str:
    """Return the line for a user's mistake: the name of its class in errors.py, and its text."""
    kinds = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return f"{next(kinds).__name__}: {error}"
