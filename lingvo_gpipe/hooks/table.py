"""A CSV file of a run, a row per step, which a resumed run continues."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from lingvo_gpipe import errors, regular_files

STEP = "step"
"""Name of the first column."""
_MAX_BYTES = 2**30


class Table:
    """Rows of numbers by step in a CSV file; every row is on the disk when `append` returns.

    A name that comes later adds a column, empty in the rows before it.
    """

    def __init__(self, path: Path) -> None:
        """Name the file; `resume` begins it."""
        self._path = path
        self._columns: list[str] = []
        self._last = -1

    def resume(self, step: int) -> list[dict[str, float]]:
        """Keep the rows up to `step`, of which the file is the only copy; return them.

        Later rows are those of updates that the run does again. A last row that is torn is left
        out.

        Raises:
            HookError: the file is not one of these.
        """
        rows = [row for row in self._read() if row[STEP] <= step]
        self._last = int(rows[-1][STEP]) if rows else -1
        self._columns = list(rows[0]) if rows else []
        for row in rows[1:]:
            self._columns += [name for name in row if name not in self._columns]
        if self._path.exists():
            self._write(rows)
        return rows

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the row of a step; one that the file has of this step is replaced."""
        row = {STEP: step, **metrics}
        new = [name for name in row if name not in self._columns]
        if new or step <= self._last:
            kept = [old for old in self._read() if old[STEP] < step]
            self._columns += new
            self._write([*kept, row])
        else:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)
        self._last = step

    def _read(self) -> list[dict[str, float]]:
        try:
            text = regular_files.read(self._path, _MAX_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            return []
        whole = text[: text.rfind("\n") + 1]  # what follows was cut off while it was written
        reader = csv.DictReader(io.StringIO(whole))
        try:
            if reader.fieldnames and reader.fieldnames[0] != STEP:
                raise ValueError(f"its first column is {reader.fieldnames[0]!r}")
            rows = [{name: float(value) for name, value in row.items() if value} for row in reader]
            if any(STEP not in row for row in rows):
                raise ValueError("a row has no step")
        except (ValueError, TypeError, csv.Error) as error:
            raise errors.HookError(
                f"{self._path} is not a table of this run: {error}. Move it away"
            ) from error
        return rows

    def _write(self, rows: list[dict[str, float]]) -> None:
        """Replace the file, whole or not at all."""
        partial = self._path.with_name(f"{self._path.name}.writing")
        with partial.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows({**row, STEP: int(row[STEP])} for row in rows)
        partial.replace(self._path)
