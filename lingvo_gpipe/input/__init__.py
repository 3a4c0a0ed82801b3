"""Input: mini-batches as a pure function of (seed, position), from data or synthetic.

Position counts the mini-batches drawn since a run began; it is all that a checkpoint must hold of
the data. How an exported model takes its fields belongs here too (`serving`); datasets belong to
the tasks.
"""

from typing import TYPE_CHECKING

from lingvo_gpipe.imports import lazy

if TYPE_CHECKING:
    from lingvo_gpipe.input.base import Input as Input
    from lingvo_gpipe.input.base import check_split as check_split
    from lingvo_gpipe.input.indexed import Indexed as Indexed
    from lingvo_gpipe.input.indexed import InMemory as InMemory
    from lingvo_gpipe.input.reading import Batches as Batches
    from lingvo_gpipe.input.reading import Reading as Reading
    from lingvo_gpipe.input.reading import plain as plain
    from lingvo_gpipe.input.serving import Program as Program
    from lingvo_gpipe.input.serving import Serving as Serving
    from lingvo_gpipe.input.synthetic import Synthetic as Synthetic
    from lingvo_gpipe.input.synthetic import SyntheticExamples as SyntheticExamples
    from lingvo_gpipe.nests import Batch as Batch

# Lazily: `synthetic` reads an input's params, and needs the network.
__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "base": ["Batch", "Input", "check_split"],
        "indexed": ["InMemory", "Indexed"],
        "reading": ["Batches", "Reading", "plain"],
        "serving": ["Program", "Serving"],
        "synthetic": ["Synthetic", "SyntheticExamples"],
    },
)
