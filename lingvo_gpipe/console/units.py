"""Human-readable numbers: bytes and counts with units and back, tables with aligned columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from lingvo_gpipe import errors

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_BYTES = {
    "": 1,
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY)},
    **{f"{letter}b".lower(): 1000**power for power, letter in enumerate(_DECIMAL)},
}
_COUNTS = {letter.lower(): 1000**power for power, letter in enumerate(_DECIMAL)}
_SCALED = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z]{0,3})", re.ASCII)


def size(num_bytes: float) -> str:
    """Return a number of bytes in binary units.

    >>> size(3 * 2**20), size(1023), size(0)
    ('3.00 MiB', '1023 B', '0')
    """
    if not num_bytes:
        return "0"
    return _scaled(num_bytes, 1024, _BINARY)


def count(number: float) -> str:
    """Return a count with a decimal prefix.

    >>> count(83_900_000_000), count(12)
    ('83.9 G', '12')
    """
    return _scaled(number, 1000, _DECIMAL).rstrip()


def things(number: int, name: str) -> str:
    """Return a number of things.

    >>> things(1, "pair"), things(4000, "pair")
    ('1 pair', '4,000 pairs')
    """
    return f"{number:,} {name if number == 1 else plural(name)}"


def plural(name: str) -> str:
    """Return the plural of the name of a thing.

    >>> plural("pair"), plural("mini-batch")
    ('pairs', 'mini-batches')
    """
    return f"{name}es" if name.endswith("ch") else f"{name}s"


def percent(share: float) -> str:
    """Return a share in [0, 1] as per cent.

    >>> percent(0.125)
    '12.5 %'
    """
    return f"{100 * share:.1f} %"


def _scaled(number: float, base: int, units: Sequence[str]) -> str:
    power = 0
    # Three digits are shown, and 999.9 k would round to 1000 k.
    while round(number, 0 if number >= 100 else 1) >= base and power < len(units) - 1:
        number, power = number / base, power + 1
    if power == 0 and number == int(number):
        return f"{int(number)} {units[0]}"
    digits = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:.{digits}f} {units[power]}"


def parse_size(text: str) -> int:
    """Return the bytes that `text` names: 8GiB, 512 MiB, 1.5GB, 4096.

    Raises:
        ParamsError: it is not a size, or one in bits, such as 10Gb.

    >>> parse_size("8GiB")
    8589934592
    """
    if re.search("[A-Z]i?b$", text.strip()):
        raise errors.ParamsError(f"{text[:40]!r} are bits. Write bytes, such as 1.25GB for 10Gb")
    return _parse(text, _BYTES, "a size", "unit, such as 8GiB, 512MiB or 16GB")


def parse_count(text: str) -> int:
    """Return the number that `text` names: 150T, 2.5 G, 4096.

    Raises:
        ParamsError: it is not a number.

    >>> parse_count("2.5G")
    2500000000
    """
    return _parse(text, _COUNTS, "a number", "letter, such as 150T or 2.5G")


def _parse(text: str, factors: Mapping[str, int], what: str, suffix: str) -> int:
    match = _SCALED.fullmatch(text.strip())
    if match is None or match[2].lower() not in factors:
        raise errors.ParamsError(f"{text[:40]!r} is not {what}. Write a number and a {suffix}")
    return int(float(match[1]) * factors[match[2].lower()])


def table(rows: Iterable[Sequence[str]], align: str) -> list[str]:
    r"""Return rows of texts as lines with aligned columns, two spaces apart.

    A row of one text is a line of its own.

    Args:
        rows: each has one text per column.
        align: a letter per column, l for left and r for right.

    >>> print("\n".join(table([["a", "10"], ["bcd", "9"]], "lr")))
    a    10
    bcd   9
    """
    rows = list(rows)
    widths = [
        max((len(row[column]) for row in rows if len(row) > 1), default=0)
        for column in range(len(align))
    ]
    lines = []
    for row in rows:
        if len(row) == 1:
            lines.append(row[0])
            continue
        cells = (
            text.ljust(width) if edge == "l" else text.rjust(width)
            for text, width, edge in zip(row, widths, align, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def shortened(text: str, width: int) -> str:
    """Return `text`, shortened in the middle where it is wider than `width`.

    >>> shortened("transformer_layer_1000", 15)
    'transfo…er_1000'
    """
    if len(text) <= width:
        return text
    head = width // 2
    return f"{text[:head]}…{text[len(text) - (width - head - 1) :]}"
