"""What the project's commands share: typed flags, lines for users, one line for a mistake."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

from absl import flags

from lingvo_gpipe import errors

_HELP = ("-h", "-help", "--help", "--helpfull")


class Flags:
    """The closed list of a command's flags, apart from any other program's.

    >>> known = Flags("count", "Counts.")
    >>> known.number("most", "Where it ends.")
    >>> known.read(["--most=3"]).most
    3
    """

    def __init__(self, program: str, usage: str) -> None:
        """Begin a list.

        Args:
            program: name of the command.
            usage: what it does and how it is called, on lines of their own before the flags' help.
        """
        self._program = program
        self._usage = usage
        self._values = flags.FlagValues()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def text(self, name: str, help_text: str, default: str | None = None) -> None:
        """Add a flag with a text."""
        flags.DEFINE_string(name, default, help_text, flag_values=self._values)

    def number(self, name: str, help_text: str) -> None:
        """Add a flag with a whole number; not given: None."""
        flags.DEFINE_integer(name, None, help_text, flag_values=self._values)

    def switch(self, name: str, help_text: str) -> None:
        """Add a flag that is there or not."""
        flags.DEFINE_bool(name, False, help_text, flag_values=self._values)

    def repeated(self, name: str, help_text: str) -> None:
        """Add a flag that may be given several times, each with a text."""
        flags.DEFINE_multi_string(name, [], help_text, flag_values=self._values)

    def several(self, name: str, help_text: str) -> None:
        """Add a flag with texts between commas."""
        flags.DEFINE_list(name, [], help_text, flag_values=self._values)

    def read(self, arguments: Sequence[str]) -> flags.FlagValues | None:
        """Return the values of `arguments`, which does not hold the program's name, once.

        Returns:
            The values as attributes; None where help was asked for, which is printed.

        Raises:
            ParamsError: a flag is unknown, misspelt, or has a value of the wrong kind.
        """
        if any(argument in _HELP for argument in arguments):
            help_text = self._values.get_help(include_special_flags=False)
            report(f"{self._usage}{help_text}")
            return None
        try:
            rest = self._values([self._program, *arguments])[1:]
        except flags.Error as error:
            raise errors.ParamsError(
                f"{str(error).rstrip(' ?')}. --help lists all flags"
            ) from error
        if rest:
            raise errors.ParamsError(
                f"{rest[0]!r} stands alone: every argument is a flag. --help lists them"
            )
        return self._values


def report(line: str) -> None:
    r"""Print a line for the user, and leave a progress bar below it whole.

    A full disk behind the output ends no work: the line is written later, or lost. A character
    that the output's encoding lacks, such as a path's byte that is no UTF-8, is told as `\udcff`.

    Raises:
        BrokenPipeError: whoever read is gone.
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
    """Bring the output to its end; tell if it cannot be written, such as to a full disk.

    Returns:
        Whether it was written.

    Raises:
        BrokenPipeError: whoever read is gone.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        note(f"the end of the output cannot be written: {error.strerror}")
        return False
    return True


def drop_output() -> None:
    """Let the rest of the output go nowhere: Python would fail again to write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def mistake(error: errors.UserError) -> str:
    """Return what a user's mistake is told as: its kind as errors.py has it, and its text."""
    kinds = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return f"{next(kinds).__name__}: {error}"
