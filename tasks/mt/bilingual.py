"""One pair of languages, named by the language that is translated to English."""

from __future__ import annotations

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.tasks.mt.input import Translation

_ENGLISH = "en"


class Bilingual(Translation):
    """Sentence pairs of one language and English, from records that may hold more."""

    class Params(Translation.Params):
        """Fields of Bilingual."""

        language: str = hyperparams.field("de", "Language that is translated to English.")

    params: Params

    def __init__(self, params: Params) -> None:
        pairs = (f"{params.language}:{_ENGLISH}",)
        if params.pairs not in ((), pairs):
            raise errors.InputError(
                f"input.pairs={','.join(params.pairs)} is not {pairs[0]}, the pair of "
                f"input.language={params.language}. Set one of the two"
            )
        super().__init__(params.copy().set(pairs=pairs))
