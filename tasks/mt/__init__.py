"""Translation to English: text preparation, the Transformer, decoding and scores."""

from typing import TYPE_CHECKING

from lingvo_gpipe.imports import lazy

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.mt.bilingual import Bilingual as Bilingual
    from lingvo_gpipe.tasks.mt.decoding.decode_params import Decode as Decode
    from lingvo_gpipe.tasks.mt.decoding.scoring.scores import Scoring as Scoring
    from lingvo_gpipe.tasks.mt.decoding.search import Search as Search
    from lingvo_gpipe.tasks.mt.input import Translation as Translation
    from lingvo_gpipe.tasks.mt.model.block import Block as Block
    from lingvo_gpipe.tasks.mt.model.decoder import DecoderLayer as DecoderLayer
    from lingvo_gpipe.tasks.mt.model.embedding import EmbeddingPositions as EmbeddingPositions
    from lingvo_gpipe.tasks.mt.model.embedding import TokenEmbedding as TokenEmbedding
    from lingvo_gpipe.tasks.mt.model.embedding import TokenEmbeddingSlice as TokenEmbeddingSlice
    from lingvo_gpipe.tasks.mt.model.encoder import EncoderLayer as EncoderLayer
    from lingvo_gpipe.tasks.mt.model.encoder import MixtureEnd as MixtureEnd
    from lingvo_gpipe.tasks.mt.model.encoder import (
        TransparentEncoderLayer as TransparentEncoderLayer,
    )
    from lingvo_gpipe.tasks.mt.model.mixture import Mixture as Mixture
    from lingvo_gpipe.tasks.mt.model.softmax import TranslationLoss as TranslationLoss
    from lingvo_gpipe.tasks.mt.model.softmax import TranslationSoftmax as TranslationSoftmax
    from lingvo_gpipe.tasks.mt.model.transformer import (
        TranslationTransformer as TranslationTransformer,
    )
    from lingvo_gpipe.tasks.mt.synthetic import SyntheticTranslation as SyntheticTranslation
    from lingvo_gpipe.tasks.mt.task import TranslationTask as TranslationTask
    from lingvo_gpipe.tasks.mt.text.corpora.corpus import Corpus as Corpus
    from lingvo_gpipe.tasks.mt.text.corpora.django_catalogues import Django as Django
    from lingvo_gpipe.tasks.mt.text.corpora.faults import FaultPolicy as FaultPolicy
    from lingvo_gpipe.tasks.mt.text.corpora.made_text import MadeText as MadeText
    from lingvo_gpipe.tasks.mt.text.corpora.text_files import TSV as TSV
    from lingvo_gpipe.tasks.mt.text.corpora.text_files import Aligned as Aligned
    from lingvo_gpipe.tasks.mt.text.corpora.text_files import FileCorpus as FileCorpus
    from lingvo_gpipe.tasks.mt.text.corpora.text_files import TranslateFolder as TranslateFolder
    from lingvo_gpipe.tasks.mt.text.corpora.tfds_corpus import TFDSCorpus as TFDSCorpus
    from lingvo_gpipe.tasks.mt.text.preparation import Preparation as Preparation
    from lingvo_gpipe.tasks.mt.text.vocabulary_training import (
        VocabularyTraining as VocabularyTraining,
    )

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "bilingual": ["Bilingual"],
        "decoding.scoring.scores": ["Scoring"],
        "decoding.search": ["Search"],
        "decoding.decode_params": ["Decode"],
        "input": ["Translation"],
        "synthetic": ["SyntheticTranslation"],
        "model.block": ["Block"],
        "model.decoder": ["DecoderLayer"],
        "model.embedding": ["EmbeddingPositions", "TokenEmbedding", "TokenEmbeddingSlice"],
        "model.encoder": ["EncoderLayer", "MixtureEnd", "TransparentEncoderLayer"],
        "model.mixture": ["Mixture"],
        "model.softmax": ["TranslationLoss", "TranslationSoftmax"],
        "model.transformer": ["TranslationTransformer"],
        "task": ["TranslationTask"],
        "text.corpora.corpus": ["Corpus"],
        "text.corpora.django_catalogues": ["Django"],
        "text.corpora.faults": ["FaultPolicy"],
        "text.corpora.made_text": ["MadeText"],
        "text.corpora.text_files": ["Aligned", "FileCorpus", "TSV", "TranslateFolder"],
        "text.corpora.tfds_corpus": ["TFDSCorpus"],
        "text.preparation": ["Preparation"],
        "text.vocabulary_training": ["VocabularyTraining"],
    },
)
