"""Image classification: AmoebaNet and small networks, datasets, augmentation."""

from typing import TYPE_CHECKING

from lingvo_gpipe import lazy

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.image.amoebanet import AmoebaCell as AmoebaCell
    from lingvo_gpipe.tasks.image.amoebanet import AuxiliaryHead as AuxiliaryHead
    from lingvo_gpipe.tasks.image.amoebanet import Classifier as Classifier
    from lingvo_gpipe.tasks.image.amoebanet import CropSoftmax as CropSoftmax
    from lingvo_gpipe.tasks.image.amoebanet import Stem as Stem
    from lingvo_gpipe.tasks.image.digits import SklearnDigits as SklearnDigits
    from lingvo_gpipe.tasks.image.folder import ImageFolder as ImageFolder
    from lingvo_gpipe.tasks.image.images import Images as Images
    from lingvo_gpipe.tasks.image.operations import DropPath as DropPath
    from lingvo_gpipe.tasks.image.operations import FactorizedReduction as FactorizedReduction
    from lingvo_gpipe.tasks.image.operations import Fit as Fit
    from lingvo_gpipe.tasks.image.operations import Operation as Operation
    from lingvo_gpipe.tasks.image.operations import WholeConv2D as WholeConv2D
    from lingvo_gpipe.tasks.image.tfds import TFDS as TFDS

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "amoebanet": ["AmoebaCell", "AuxiliaryHead", "Classifier", "CropSoftmax", "Stem"],
        "digits": ["SklearnDigits"],
        "folder": ["ImageFolder"],
        "images": ["Images"],
        "operations": ["DropPath", "FactorizedReduction", "Fit", "Operation", "WholeConv2D"],
        "tfds": ["TFDS"],
    },
)
