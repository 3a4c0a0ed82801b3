"""The paper's tables: speeds within the schedule's bound."""

from __future__ import annotations

import pytest

from benchmarks import tables


@pytest.mark.parametrize("name", tables.FAMILIES)
def test_speeds_are_within_the_bound_and_fall_with_slower_links(name: str) -> None:
    family = tables.FAMILIES[name]
    assert tables.speed(family.model_2, 2, 1) == pytest.approx(1.0)
    assert 0.8 < tables.speed(family.model_2, 8, 32) / (32 * 8 / 39) <= 1.0
    by_link = [
        tables.speed(family.model_3, 8, 32, link, is_table_3=True) for link in tables.BANDWIDTHS
    ]
    assert by_link == sorted(by_link, reverse=True)
    assert by_link[-1] < by_link[0]


def test_an_unknown_table_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tables.main(["--only=1,4"])
    assert capsys.readouterr().err.endswith("--only: unknown '4'; there are 1, 2, 3\n")
