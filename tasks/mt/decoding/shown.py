"""A few sentences of each pair of languages, which every evaluation of a run translates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lingvo_gpipe import pipelining
from lingvo_gpipe.run.views import markdown
from lingvo_gpipe.tasks.mt.decoding import score, translator
from lingvo_gpipe.tasks.mt.decoding.decode_params import Decode

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.mt.input import Translation

_HEADINGS = ("source", "translation", "reference")


class ShownTranslations:
    """Translates the same sentences each time: `translations/PAIR` → a table of them.

    Their sources are padded to one length, so that two graphs are traced, once in a run.
    """

    def __init__(
        self,
        pipe: pipelining.PipeliningLayer,
        source: Translation,
        settings: Decode,
        split: str,
    ) -> None:
        """Choose the sentences, evenly spaced over those of a split that training would not drop.

        Args:
            pipe: the network.
            source: its input.
            settings: how it decodes; `shown` and `max_shown` limit the number of sentences.
            split: where they are.

        Raises:
            UserError: the network cannot translate, or there is no such text.
        """
        self._vocabulary = source.vocabulary
        self._chosen = score.sentences_to_translate(
            source,
            split,
            settings.shown,
            in_all=settings.max_shown,
            longest=source.params.max_length,
        )
        ids = [sentence for part in self._chosen for sentence in part.ids]
        self._translator = translator.Translator(
            pipe,
            settings.copy().set(num_shapes=1),
            max_length=max(map(len, ids)),
            controls=len(self._vocabulary.targets),
        )

    def __call__(self, should_stop: Callable[[], bool]) -> Mapping[str, str]:
        """Return the tables; none once `should_stop` returns True. See `task.Texts`."""
        try:
            translated = list(
                score.translations(
                    self._translator.translate, self._vocabulary, self._chosen, should_stop
                )
            )
        except translator.StoppedError:
            return {}
        return {
            f"translations/{part.pair}": markdown.table(
                _HEADINGS, zip(part.sources, part.hypotheses, part.references, strict=True)
            )
            for part in translated
        }
