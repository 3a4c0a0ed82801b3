"""What a run measures of itself, and what it knows of its hosts."""

from __future__ import annotations

import dataclasses
import re

from lingvo_gpipe import errors
from lingvo_gpipe.plan.hosts import Hosts

_STEPS = re.compile(r"([0-9]{1,12}):([0-9]{1,12})", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class Profiles:
    """What a run measures, and what is known of its hosts.

    Attributes:
        steps: updates whose slots are timed, from 1 on; see `recorder`.
        layers: whether times of layers are measured, by which `--schedule=auto` chooses, and with
            which `steps` are compared.
        hosts: links and memory by which `--schedule=auto` chooses; they place no cell. None: not
            known.
    """

    steps: range = range(0)
    layers: bool = False
    hosts: Hosts | None = None


NO_PROFILES = Profiles()


def parse(text: str) -> range:
    """Return the steps that `--profile_steps` names; the first update of a run is step 1.

    Raises:
        ParamsError: the text is not A:B with 1 <= A < B.

    >>> parse("10:12")
    range(10, 12)
    """
    match = _STEPS.fullmatch(text.strip())
    if match is None or not 1 <= int(match[1]) < int(match[2]):
        raise errors.ParamsError(
            f"--profile_steps={text[:40]} is not a range of steps, the first of which is 1. Write "
            "the first one and the one after the last, such as 10:12 for the steps 10 and 11"
        )
    return range(int(match[1]), int(match[2]))
