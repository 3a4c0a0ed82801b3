"""Translation by a model that is spread over devices: one token is one sweep over its cells."""

from __future__ import annotations

from lingvo_gpipe import hyperparams
from lingvo_gpipe.tasks.mt import search as search_lib


class Decode(hyperparams.Params):
    """How sentences are translated, and from where to where."""

    search: search_lib.Search = hyperparams.field(search_lib.Search(), "How one is searched for.")
    batch: int = hyperparams.field(32, "Sentences of a group, which are translated together.")
    groups: int | None = hyperparams.field(
        None, "M: groups that are on their way through the cells; None: as many as cells."
    )
    max_length: int | None = hyperparams.field(
        None, "Source tokens at most, </s> included: longer lines are split; None: input's."
    )
    num_shapes: int = hyperparams.field(
        4, "Lengths that sources are padded to at most: each is traced once, and pads less."
    )
    target: str | None = hyperparams.field(
        None, "Language to translate to, of those that the vocabulary has a <2xx> for."
    )
    input: str | None = hyperparams.field(None, "File of lines; None: the standard input.")
    output: str | None = hyperparams.field(None, "File of translations; None: standard output.")
    read_ahead: int = hyperparams.field(
        8192, "Lines that are read, sorted by length and translated together."
    )
