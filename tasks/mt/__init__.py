"""Translation to English: text preparation, the Transformer, decoding and scores."""

from lingvo_gpipe.tasks.mt.decoding.scores import Scoring
from lingvo_gpipe.tasks.mt.decoding.search import Decode, Search
from lingvo_gpipe.tasks.mt.input import Translation
from lingvo_gpipe.tasks.mt.model.block import Block
from lingvo_gpipe.tasks.mt.model.decoder import DecoderLayer
from lingvo_gpipe.tasks.mt.model.embedding import (
    EmbeddingPositions,
    TokenEmbedding,
    TokenEmbeddingSlice,
)
from lingvo_gpipe.tasks.mt.model.encoder import EncoderLayer, MixtureEnd, TransparentEncoderLayer
from lingvo_gpipe.tasks.mt.model.mixture import Mixture
from lingvo_gpipe.tasks.mt.model.softmax import TranslationLoss, TranslationSoftmax
from lingvo_gpipe.tasks.mt.model.transformer import TranslationTransformer
from lingvo_gpipe.tasks.mt.synthetic import SyntheticText, SyntheticTranslation
from lingvo_gpipe.tasks.mt.task import TranslationTask
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Corpus
from lingvo_gpipe.tasks.mt.text.corpora.django_catalogues import Django
from lingvo_gpipe.tasks.mt.text.corpora.text_files import TSV, Aligned, FileCorpus, TranslateFolder
from lingvo_gpipe.tasks.mt.text.corpora.tfds_corpus import TFDSCorpus
from lingvo_gpipe.tasks.mt.text.preparation import Preparation
from lingvo_gpipe.tasks.mt.text.vocabulary import VocabularyTraining

__all__ = [
    "TSV",
    "Aligned",
    "Block",
    "Corpus",
    "Decode",
    "DecoderLayer",
    "Django",
    "EmbeddingPositions",
    "EncoderLayer",
    "FileCorpus",
    "Mixture",
    "MixtureEnd",
    "Preparation",
    "Scoring",
    "Search",
    "SyntheticText",
    "SyntheticTranslation",
    "TFDSCorpus",
    "TokenEmbedding",
    "TokenEmbeddingSlice",
    "TranslateFolder",
    "Translation",
    "TranslationLoss",
    "TranslationSoftmax",
    "TranslationTask",
    "TranslationTransformer",
    "TransparentEncoderLayer",
    "VocabularyTraining",
]
