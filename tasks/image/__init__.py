"""Image classification: AmoebaNet and small networks, datasets, augmentation."""

from typing import TYPE_CHECKING

from lingvo_gpipe.imports import lazy

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.image.data.digits import SklearnDigits as SklearnDigits
    from lingvo_gpipe.tasks.image.data.folder import ImageFolder as ImageFolder
    from lingvo_gpipe.tasks.image.data.images import Images as Images
    from lingvo_gpipe.tasks.image.data.tfds import TFDS as TFDS
    from lingvo_gpipe.tasks.image.model.amoebanet import AmoebaCell as AmoebaCell
    from lingvo_gpipe.tasks.image.model.amoebanet import AmoebaNet as AmoebaNet
    from lingvo_gpipe.tasks.image.model.amoebanet import Stem as Stem
    from lingvo_gpipe.tasks.image.model.heads import AuxiliaryHead as AuxiliaryHead
    from lingvo_gpipe.tasks.image.model.heads import Classifier as Classifier
    from lingvo_gpipe.tasks.image.model.heads import CropSoftmax as CropSoftmax
    from lingvo_gpipe.tasks.image.model.operations import DropPath as DropPath
    from lingvo_gpipe.tasks.image.model.operations import FactorizedReduction as FactorizedReduction
    from lingvo_gpipe.tasks.image.model.operations import Fit as Fit
    from lingvo_gpipe.tasks.image.model.operations import Operation as Operation
    from lingvo_gpipe.tasks.image.model.operations import WholeConv2D as WholeConv2D

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "model.amoebanet": ["AmoebaCell", "AmoebaNet", "Stem"],
        "model.heads": ["AuxiliaryHead", "Classifier", "CropSoftmax"],
        "data.digits": ["SklearnDigits"],
        "data.folder": ["ImageFolder"],
        "data.images": ["Images"],
        "model.operations": ["DropPath", "FactorizedReduction", "Fit", "Operation", "WholeConv2D"],
        "data.tfds": ["TFDS"],
    },
)
