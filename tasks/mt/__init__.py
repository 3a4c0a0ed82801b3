"""Translation to English: text preparation, the Transformer, decoding and scores."""

from typing import TYPE_CHECKING

from lingvo_gpipe import lazy

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.mt.bilingual import Bilingual as Bilingual
    from lingvo_gpipe.tasks.mt.decoding.scores import Scoring as Scoring
    from lingvo_gpipe.tasks.mt.decoding.search import Search as Search
    from lingvo_gpipe.tasks.mt.decoding.translator import Decode as Decode
    from lingvo_gpipe.tasks.mt.input import Translation as Translation
    from lingvo_gpipe.tasks.mt.model.layers import Block as Block
    from lingvo_gpipe.tasks.mt.model.layers import DecoderLayer as DecoderLayer
    from lingvo_gpipe.tasks.mt.model.layers import EncoderLayer as EncoderLayer
    from lingvo_gpipe.tasks.mt.model.layers import Mixture as Mixture
    from lingvo_gpipe.tasks.mt.model.layers import TokenEmbedding as TokenEmbedding
    from lingvo_gpipe.tasks.mt.model.layers import TranslationSoftmax as TranslationSoftmax
    from lingvo_gpipe.tasks.mt.model.layers import (
        TransparentEncoderLayer as TransparentEncoderLayer,
    )
    from lingvo_gpipe.tasks.mt.model.transformer import (
        TranslationTransformer as TranslationTransformer,
    )
    from lingvo_gpipe.tasks.mt.task import TranslationTask as TranslationTask
    from lingvo_gpipe.tasks.mt.text.catalogues import Django as Django
    from lingvo_gpipe.tasks.mt.text.corpus import TSV as TSV
    from lingvo_gpipe.tasks.mt.text.corpus import Aligned as Aligned
    from lingvo_gpipe.tasks.mt.text.corpus import Corpus as Corpus
    from lingvo_gpipe.tasks.mt.text.corpus import Files as Files
    from lingvo_gpipe.tasks.mt.text.corpus import Policy as Policy
    from lingvo_gpipe.tasks.mt.text.corpus import TranslateFolder as TranslateFolder
    from lingvo_gpipe.tasks.mt.text.preparation import Preparation as Preparation
    from lingvo_gpipe.tasks.mt.text.tfds_corpus import TFDS as TFDS
    from lingvo_gpipe.tasks.mt.text.vocabulary import Training as Training

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "bilingual": ["Bilingual"],
        "decoding.scores": ["Scoring"],
        "decoding.search": ["Search"],
        "decoding.translator": ["Decode"],
        "input": ["Translation"],
        "model.layers": [
            "Block",
            "DecoderLayer",
            "EncoderLayer",
            "Mixture",
            "TokenEmbedding",
            "TranslationSoftmax",
            "TransparentEncoderLayer",
        ],
        "model.transformer": ["TranslationTransformer"],
        "task": ["TranslationTask"],
        "text.catalogues": ["Django"],
        "text.corpus": ["Aligned", "Corpus", "Files", "Policy", "TSV", "TranslateFolder"],
        "text.preparation": ["Preparation"],
        "text.tfds_corpus": ["TFDS"],
        "text.vocabulary": ["Training"],
    },
)
