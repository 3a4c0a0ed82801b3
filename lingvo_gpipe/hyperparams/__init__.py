"""Params: trees of declared, typed fields, their text form, and classes that are made from them.

What the fields of a class mean belongs to that class. Nothing here knows layers or imports
TensorFlow.
"""

from lingvo_gpipe.hyperparams.configurable import Configurable
from lingvo_gpipe.hyperparams.fields import REQUIRED, Field, field, required
from lingvo_gpipe.hyperparams.params import Params, from_text
from lingvo_gpipe.hyperparams.references.names import register_package, registered_packages
from lingvo_gpipe.hyperparams.suggestions import HoldsParamsError, classes_like
from lingvo_gpipe.hyperparams.tree import UnknownFieldError

__all__ = [
    "REQUIRED",
    "Configurable",
    "Field",
    "HoldsParamsError",
    "Params",
    "UnknownFieldError",
    "classes_like",
    "field",
    "from_text",
    "register_package",
    "registered_packages",
    "required",
]
