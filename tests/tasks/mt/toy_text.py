"""An artificial language pair, large enough to train a small vocabulary in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lingvo_gpipe.tasks.mt.text import preparation
from lingvo_gpipe.tasks.mt.text.corpora import text_files
from lingvo_gpipe.tasks.mt.text.vocabulary import VocabularyTraining

SYLLABLES = ("ba", "do", "ke", "li", "mu", "na", "po", "ri", "su", "te")
WORDS = [one + other for one in SYLLABLES for other in SYLLABLES]


def sentences(count: int, seed: int) -> list[str]:
    """Return made sentences of 1 to 12 words."""
    random = np.random.RandomState(seed)
    lengths = random.randint(1, 13, count)
    return [" ".join(WORDS[n] for n in random.randint(0, len(WORDS), k)) for k in lengths]


def write_folder(folder: Path, sizes: dict[str, int], held_out: int = 20) -> Path:
    """Write one TranslateFolder for each language, against English; return the folder."""
    for number, (language, size) in enumerate(sizes.items()):
        where = folder / language
        where.mkdir(parents=True, exist_ok=True)
        for split, count, seed in (("train", size, 0), ("test", held_out, 1)):
            english = sentences(count, 10 * number + seed)
            other = [" ".join(word[::-1] for word in line.split()) for line in english]
            for name, lines in (("en", english), (language, other)):
                text = "".join(f"{line}\n" for line in lines)
                (where / f"{name}.{split}.txt").write_text(text, encoding="utf-8")
    return folder


def params(folder: Path, **fields: Any) -> Any:
    """Return the Params of a preparation of such folders, with a small vocabulary."""
    made: dict[str, Any] = {
        "corpora": [text_files.TranslateFolder.Params(folder=str(folder))],
        "vocabulary": VocabularyTraining(size=330),
    }
    return preparation.Preparation.Params(**made | fields)
