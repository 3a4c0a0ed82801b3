"""Classes that are made from Params."""

from __future__ import annotations

import types
from typing import Any

from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams.params import Params
from lingvo_gpipe.hyperparams.references import names

_ParamsBase = Params  # inside Configurable, Params is the nested class


class Configurable:
    """Base of everything that is made from Params.

    A subclass declares its fields in a nested class `Params(Base.Params)`; for one that declares
    none, a `Params` with its base's fields is made. The constructor takes a copy of the params
    first, from `params.instantiate()`.
    """

    class Params(_ParamsBase):
        """Params of Configurable: no fields."""

    params: Any  # a subclass declares it as its own Params, for editors and type checkers

    def __init__(self, params: Configurable.Params) -> None:
        self.params = params

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        bases = list(dict.fromkeys(b.Params for b in cls.__bases__ if issubclass(b, Configurable)))
        if "Params" not in cls.__dict__:
            body = {
                "__module__": cls.__module__,
                "__qualname__": f"{cls.__qualname__}.Params",
                "__doc__": f"Params of {cls.__qualname__}.",
            }
            derived = types.new_class("Params", tuple(bases), {}, lambda to: to.update(body))
            cls.Params = derived  # type: ignore[misc, assignment]
        for base in bases:
            if not issubclass(cls.Params, base):
                raise ParamsError(
                    f"{names.public_name(cls)}.Params must inherit {names.public_name(base)}"
                )
        if cls.Params.owner is not None:
            raise ParamsError(
                f"{names.public_name(cls)}.Params belongs to {cls.Params.class_name()} already; "
                "declare a nested class that inherits it"
            )
        cls.Params.owner = cls


Configurable.Params.owner = Configurable
