"""The closed list of a command's flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gpipe import errors
from lingvo_gpipe.console import output

_HELP = ("-h", "-help", "--help", "--helpfull")
_TRUE = ("true", "t", "1", "yes", "y")
_FALSE = ("false", "f", "0", "no", "n")


class Flags:
    """The closed list of a command's flags, each written `--name=value`.

    Attributes:
        names: names of the flags.

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
        self._parser = argparse.ArgumentParser(
            usage=argparse.SUPPRESS,
            description=usage.strip(),
            formatter_class=lambda prog: _Formatter(prog, width=100),
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )
        self.names: list[str] = []

    def text(self, name: str, help_text: str) -> None:
        """Add a flag with a text; None where it is not given."""
        self._add(name, help_text)

    def optional_text(self, name: str, help_text: str, bare: str) -> None:
        """Add a flag with a text; `bare` where the flag is given without a text."""
        self._add(name, help_text, nargs="?", const=bare)

    def number(self, name: str, help_text: str) -> None:
        """Add a flag with a whole number; None where it is not given."""
        self._add(name, help_text, type=_of_kind(int, "a whole number"))

    def switch(self, name: str, help_text: str) -> None:
        """Add a flag that turns something on; `--noNAME` turns it off again."""
        kind = _of_kind(_boolean, "true or false")
        self._add(name, help_text, nargs="?", const=True, default=False, type=kind)
        self._parser.add_argument(
            f"--no{name}",
            f"-no{name}",
            dest=name,
            action="store_false",
            default=False,
            help=argparse.SUPPRESS,
        )

    def repeated(self, name: str, help_text: str) -> None:
        """Add a flag that may be given several times, each with a text."""
        self._add(name, help_text, action="append", default=[])

    def several(self, name: str, help_text: str) -> None:
        """Add a flag with texts between commas."""
        self._add(name, help_text, default=[], type=_split)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace | None:
        """Return the values of `arguments`, which does not hold the program's name.

        Returns:
            The values as attributes; None where help was asked for, which is printed.

        Raises:
            ParamsError: a flag is unknown, misspelt, or has a value of the wrong kind.
        """
        if any(argument in _HELP for argument in arguments):
            output.report(self._parser.format_help().rstrip())
            return None
        try:
            values, rest = self._parser.parse_known_args(list(arguments))
        except argparse.ArgumentError as error:
            flag = (error.argument_name or "").partition("/")[0]
            raise errors.ParamsError(
                f"flag {flag}: {error.message}. --help lists all flags"
            ) from error
        for argument in rest:
            if not argument.startswith("-"):
                raise errors.ParamsError(
                    f"{argument!r} stands alone: every argument is a flag. --help lists them"
                )
            name = argument.lstrip("-").partition("=")[0]
            near = [f"--{flag}" for flag in errors.nearest(name, self.names)]
            hint = f"nearest {', '.join(near)}. " if near else ""
            raise errors.ParamsError(f"unknown flag --{name}; {hint}--help lists all flags")
        return values

    def _add(self, name: str, help_text: str, **settings: Any) -> None:
        self.names.append(name)
        self._parser.add_argument(
            f"--{name}", f"-{name}", help=help_text.replace("%", "%%"), **settings
        )


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows each flag as `--name`, which is how it is written in all documents."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return action.option_strings[0]


def _of_kind(convert: Callable[[str], object], kind: str) -> Callable[[str], object]:
    """Return `convert` with an error that says what a value must be."""

    def converted(text: str) -> object:
        try:
            return convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}") from None

    return converted


def _boolean(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError(text)
    return text.lower() in _TRUE


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []
