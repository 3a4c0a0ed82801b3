"""Input: mini-batches as a pure function of (seed, position), from data or synthetic.

Position counts the mini-batches drawn since a run began; it is all that a checkpoint must hold of
the data. How an exported model takes its fields belongs here too (`serving`); datasets belong to
the tasks.
"""

from lingvo_gpipe.input.base import Input, check_split
from lingvo_gpipe.input.indexed import Indexed, InMemory
from lingvo_gpipe.input.reading import Batches, Reading, plain
from lingvo_gpipe.input.serving import Program, Serving
from lingvo_gpipe.input.synthetic import Synthetic, SyntheticExamples
from lingvo_gpipe.nests import Batch

__all__ = [
    "Batch",
    "Batches",
    "InMemory",
    "Indexed",
    "Input",
    "Program",
    "Reading",
    "Serving",
    "Synthetic",
    "SyntheticExamples",
    "check_split",
    "plain",
]
