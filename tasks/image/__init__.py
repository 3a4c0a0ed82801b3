"""Image classification: AmoebaNet and small networks, datasets, augmentation."""

from lingvo_gpipe.tasks.image.data.digits import SklearnDigits
from lingvo_gpipe.tasks.image.data.folder import ImageFolder
from lingvo_gpipe.tasks.image.data.images import Images
from lingvo_gpipe.tasks.image.data.tfds import TFDS
from lingvo_gpipe.tasks.image.model.amoebanet import AmoebaCell, AmoebaNet, Stem
from lingvo_gpipe.tasks.image.model.heads import AuxiliaryHead, Classifier
from lingvo_gpipe.tasks.image.model.operations import (
    DropPath,
    FactorizedReduction,
    Fit,
    Operation,
    WholeConv2D,
)

__all__ = [
    "TFDS",
    "AmoebaCell",
    "AmoebaNet",
    "AuxiliaryHead",
    "Classifier",
    "DropPath",
    "FactorizedReduction",
    "Fit",
    "ImageFolder",
    "Images",
    "Operation",
    "SklearnDigits",
    "Stem",
    "WholeConv2D",
]
