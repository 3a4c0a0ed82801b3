"""The closed list of a command's flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from lingvo_gpipe import errors


class Flags(argparse.ArgumentParser):
    """Flags, each written `--name=value`; a mistake is a `ParamsError`.

    >>> flags = Flags("Counts.")
    >>> flags.number("most", "Where it ends.")
    >>> flags.read(["--most=3"]).most
    3
    """

    def __init__(self, usage: str) -> None:
        """Begin a list.

        Args:
            usage: what the command does and how it is called, printed before the flags' help.
        """
        super().__init__(
            usage=argparse.SUPPRESS,
            description=usage.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def text(self, name: str, help_text: str) -> None:
        """Add a flag with a text; None where it is not given."""
        self.add_argument(f"--{name}", help=help_text)

    def number(self, name: str, help_text: str) -> None:
        """Add a flag with a whole number; None where it is not given."""
        self.add_argument(f"--{name}", help=help_text, type=int)

    def switch(self, name: str, help_text: str) -> None:
        """Add a flag that turns something on."""
        self.add_argument(f"--{name}", help=help_text, action="store_true")

    def repeated(self, name: str, help_text: str) -> None:
        """Add a flag that may be given several times, each with a text."""
        self.add_argument(f"--{name}", help=help_text, action="append", default=[])

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the values of `arguments`, which does not hold the program's name.

        Raises:
            ParamsError: a flag is unknown, misspelt, empty, or has a value of the wrong kind.
            SystemExit: help was asked for, and is printed.
        """
        values, rest = self.parse_known_args(arguments)
        for argument in rest:
            name = argument.partition("=")[0]
            near = errors.suggestion(name, self._option_string_actions)
            raise errors.ParamsError(f"unknown flag {name}; {near}. --help lists all flags")
        for name, value in vars(values).items():
            if value == "":
                raise errors.ParamsError(f"--{name}= is empty. Give a value, or leave it out")
        return values

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise errors.ParamsError(f"{message}. --help lists all flags")
