"""Input: mini-batches as a pure function of (seed, position), from data or made up.

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
    from lingvo_gpipe.input.made import Made as Made
    from lingvo_gpipe.input.made import MadeExamples as MadeExamples
    from lingvo_gpipe.input.reading import Batches as Batches
    from lingvo_gpipe.input.reading import Reading as Reading
    from lingvo_gpipe.input.reading import Repair as Repair
    from lingvo_gpipe.input.reading import as_written as as_written
    from lingvo_gpipe.input.reading import plain as plain
    from lingvo_gpipe.input.serving import Program as Program
    from lingvo_gpipe.input.serving import Serving as Serving
    from lingvo_gpipe.nests import Batch as Batch

# Lazily: `made` reads an input's params, and needs the network.
__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "base": ["Batch", "Input", "check_split"],
        "indexed": ["InMemory", "Indexed"],
        "made": ["Made", "MadeExamples"],
        "reading": ["Batches", "Reading", "Repair", "as_written", "plain"],
        "serving": ["Program", "Serving"],
    },
)
