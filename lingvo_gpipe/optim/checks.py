"""The check of the numbers in a Params class."""

from __future__ import annotations

from lingvo_gpipe import errors, hyperparams


def check(params: hyperparams.Configurable.Params, **fields: tuple[bool, str]) -> None:
    """Refuse numbers that are not possible.

    Args:
        params: the Params.
        fields: field → whether its value is possible, and what to use instead.

    Raises:
        ParamsError: a value is not possible.
    """
    owner = type(params).__qualname__.removesuffix(".Params")
    for name, (is_possible, use) in fields.items():
        if not is_possible:
            raise errors.ParamsError(
                f"{owner}: {name}={getattr(params, name)} is not possible. Use {use}"
            )
