"""The inputs that recipes of image models choose from."""

from lingvo_gpipe.tasks.image.digits import SklearnDigits as SklearnDigits
from lingvo_gpipe.tasks.image.folder import ImageFolder as ImageFolder
from lingvo_gpipe.tasks.image.images import Images as Images
from lingvo_gpipe.tasks.image.tfds import TFDS as TFDS
