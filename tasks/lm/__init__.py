"""Language models: a Transformer and its input of token ids."""

from lingvo_gpipe.tasks.lm.input import Tokens

__all__ = ["Tokens"]
