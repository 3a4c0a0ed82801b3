"""Settings of decoding, the field `decode` of a translation task."""

from __future__ import annotations

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.tasks.mt.decoding import search
from lingvo_gpipe.tasks.mt.decoding.search import Search


class Decode(hyperparams.Params):
    """How sentences are translated, and where they are read and written."""

    search: Search = hyperparams.field(Search(), "Settings of the beam search.")
    batch: int = hyperparams.field(32, "Sentences of a group, which are translated together.")
    groups: int | None = hyperparams.field(
        None,
        "M: groups that pass through the cells at the same time; None: one per cell and replica.",
    )
    max_length: int | None = hyperparams.field(
        None, "Maximum number of source tokens, with </s>; longer lines are split. None: input's."
    )
    num_shapes: int = hyperparams.field(
        4, "Lengths to which sources are padded. Each is traced once; more mean less padding."
    )
    target: str | None = hyperparams.field(
        None, "Language to translate to, one of those with a <2xx> in the vocabulary."
    )
    input: str | None = hyperparams.field(None, "File of lines; None: the standard input.")
    output: str | None = hyperparams.field(None, "File of translations; None: standard output.")
    shown: int = hyperparams.field(
        3,
        "Sentences of each pair of languages that every evaluation translates and shows in "
        "TensorBoard, always the same; 0: none.",
    )
    max_shown: int = hyperparams.field(
        30,
        "Maximum number of shown sentences of all pairs together. With more, each pair has equally "
        "fewer; of more pairs than this, as many, evenly spaced, have one.",
    )
    read_ahead: int = hyperparams.field(
        8192, "Lines that are read, sorted by length and translated together."
    )


def check(params: Decode) -> None:
    """Refuse settings that are out of range.

    Raises:
        ParamsError: names the first such setting.
    """
    search.check(params.search)
    least = {
        "batch": 1,
        "groups": 1,
        "max_length": 3,
        "num_shapes": 1,
        "read_ahead": 1,
        "shown": 0,
        "max_shown": 1,
    }
    for name, smallest in least.items():
        value = params.get(name)
        if value is not None and value < smallest:
            raise errors.ParamsError(f"decode.{name}={value} is too small. Use {smallest} or more")
