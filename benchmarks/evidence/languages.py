"""Which languages are compared: drawn by a seed that was set before any training.

Languages with little text (300 to 2,000 training pairs), most of them with relatives: languages of
the same branch and script with more text.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

SEED = 20261127
FEWEST, MOST = 300, 2_000
WITH_RELATIVES, ALONE = 8, 4
MOST_RELATIVES = 4
SENTENCES = 200  # of a language that are translated; those with little text have fewer
# Branch → its languages in one script, by their codes in the data.
BRANCHES: Mapping[str, str] = {
    "Germanic": "ang fy sco de nl af nds lb gsw da sv nb nn is fo",
    "Romance": "co fur lad lld pcd wa rm it vec lij pms oc ca fr es pt gl ast ro",
    "Slavic, Latin": "csb pl dsb hsb cs sk sl hr bs sr-Latn",
    "Turkic, Latin": "crh gag tr az tk uz",
    "Indo-Aryan, Devanagari": "bho mag sa hi ne mr mai awa",
    "Indo-Aryan, Arabic": "pnb skr ur sd",
    "Iranian, Arabic": "fa-AF fa ckb ps",
    "Malayo-Sumbawan": "ace min mad id ms jv su ban",
    "Philippine": "ceb pam tl ilo war hil bcl",
    "Bantu": "bem nd ny nso ve ss loz sw lg zu xh sn tn rw",
    "Sinitic": "gan wuu zh-Hans zh-Hant yue",
    "Celtic": "kw br cy ga gd gv",
    "Berber, Latin": "ttq kab shi",
    "constructed": "ie nov eo ia io lfn",
}
# No other language of their branch and script is in the data.
ISOLATED = "arn chr dv gn hmn lo lus mnw om"


@dataclasses.dataclass(frozen=True, slots=True)
class Scarce:
    """A language with little text.

    Attributes:
        code: of the language.
        branch: its branch; "none" if no relative is in the data.
        relatives: languages of the branch with more text, the largest first.
    """

    code: str
    branch: str
    relatives: tuple[str, ...]


def choose(pairs: Mapping[str, int], seed: int = SEED) -> list[Scarce]:
    """Return the languages with little text: at most one of each branch.

    Args:
        pairs: language → its training pairs.
        seed: of the draw.
    """
    draw = random.Random(seed)
    scarce = {code for code, count in pairs.items() if FEWEST <= count <= MOST}
    branches = {name: [c for c in codes.split() if c in scarce] for name, codes in BRANCHES.items()}
    with_relatives = []
    for name in draw.sample(sorted(branches), WITH_RELATIVES):
        others = sorted(set(BRANCHES[name].split()) - scarce, key=lambda code: -pairs[code])
        code = draw.choice(branches[name])
        with_relatives.append(Scarce(code, name, tuple(others[:MOST_RELATIVES])))
    alone = draw.sample([code for code in ISOLATED.split() if code in scarce], ALONE)
    return [*with_relatives, *(Scarce(code, "none", ()) for code in alone)]


def all_of(chosen: Sequence[Scarce]) -> list[str]:
    """Return the codes of all languages of the comparison, sorted."""
    return sorted({code for each in chosen for code in (each.code, *each.relatives)})


def count(text: Path) -> dict[str, int]:
    """Return language → its training pairs, from folders of `LANG.train.txt`."""
    return {
        folder.name: len((folder / "en.train.txt").read_text(encoding="utf-8").splitlines())
        for folder in text.iterdir()
        if (folder / "en.train.txt").is_file()
    }
