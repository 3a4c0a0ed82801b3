"""Params: trees of declared, typed fields, their text form, and classes that are made from them.

What the fields of a class mean belongs to that class. Nothing here knows layers or imports
TensorFlow.
"""

from lingvo_gpipe.hyperparams.params import (
    REQUIRED,
    Configurable,
    Field,
    Params,
    field,
    from_text,
    required,
)
from lingvo_gpipe.hyperparams.references import register_package, registered_packages
from lingvo_gpipe.hyperparams.types import Opaque

__all__ = [
    "REQUIRED",
    "Configurable",
    "Field",
    "Opaque",
    "Params",
    "field",
    "from_text",
    "register_package",
    "registered_packages",
    "required",
]
