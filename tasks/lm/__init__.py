"""Language models: a Transformer and its input of token ids."""

from typing import TYPE_CHECKING

from lingvo_gpipe.imports import lazy

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.lm.input import Tokens as Tokens

__getattr__, __dir__, __all__ = lazy.exports(__name__, {"input": ["Tokens"]})
