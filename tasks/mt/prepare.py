r"""Makes a folder of records: corpora → vocabulary → ids.

    python -m lingvo_gpipe.tasks.mt.prepare --output=records/m30k \
        --aligned=en,de:train=train.en.gz,train.de.gz --aligned=en,de:test=test.en.gz,test.de.gz

The exit code is 0 when done, 1 after a user's mistake (one line, no traceback) and 130 after
Ctrl-C. Unfinished work leaves nothing at the output path.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lingvo_gpipe import errors
from lingvo_gpipe.console import output, units
from lingvo_gpipe.console.flags import Flags
from lingvo_gpipe.tasks.mt.text import preparation
from lingvo_gpipe.tasks.mt.text.corpora import django_catalogues, text_files, tfds_corpus
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Corpus

_USAGE = """\
Makes a folder of records from corpora, to train translation models on.

  python -m lingvo_gpipe.tasks.mt.prepare --output=FOLDER --translate_folder=FOLDER …
"""


def flags() -> Flags:
    """Return the command's flags."""
    flags = Flags(_USAGE)
    flags.text("output", "Folder of records to make.")
    flags.repeated("translate_folder", "Corpus: a folder of LANG.SPLIT.txt, or of such folders.")
    flags.repeated("aligned", "Corpus: aligned files of one split, en,de:SPLIT=PATH,PATH.")
    flags.repeated(
        "tsv", "Corpus: files with tabs, en,de:SPLIT=PATH or a glob, one language per column."
    )
    flags.repeated("tfds", "Corpus: a TFDS translation dataset, such as wmt14_translate/de-en.")
    flags.switch("django", "Corpus: Django's message catalogues.")
    flags.text("tfds_dir", "Folder of TFDS datasets.")
    flags.text("pairs", "Pairs of languages, de:en,en:de; by default all to English.")
    flags.repeated(
        "override",
        "Sets a field of the preparation: PATH=VALUE, such as corpora[0].strict=True or seed=1.",
    )
    flags.number("vocabulary_size", "Maximum number of pieces; by default 64,000.")
    flags.text("vocabulary_file", "A .model file to use instead of training a vocabulary.")
    flags.number(
        "threads",
        "Threads that tokenise; by default one per core. The records do not depend on it.",
    )
    return flags


def _parts(flag: str, value: str) -> tuple[tuple[str, ...], str, str]:
    """Split `en,de:train=PATH` into languages, split and path."""
    head, _, path = value.partition("=")
    languages, _, split = head.rpartition(":")
    if not (languages and split and path):
        raise errors.ParamsError(
            f"--{flag}={value} is not of the form LANG,LANG:SPLIT=PATH, such as "
            f"--{flag}=en,de:train=train.tsv"
        )
    return tuple(languages.split(",")), split, path


def _corpora(values: argparse.Namespace) -> list[Corpus.Params]:
    """Return the Params of every corpus that the flags name."""
    corpora: list[Corpus.Params] = [
        text_files.TranslateFolder.Params(folder=folder) for folder in values.translate_folder
    ]
    for value in values.aligned:
        languages, split, path = _parts("aligned", value)
        paths = path.split(",")
        if len(paths) != len(languages):
            raise errors.ParamsError(
                f"--aligned={value} has {len(paths)} files for {len(languages)} languages"
            )
        files = {split: dict(zip(languages, paths, strict=True))}
        corpora.append(text_files.Aligned.Params(files=files))
    for value in values.tsv:
        languages, split, path = _parts("tsv", value)
        corpora.append(text_files.TSV.Params(languages=languages, files={split: path}))
    for name in values.tfds:
        folder = {} if values.tfds_dir is None else {"tfds_dir": values.tfds_dir}
        corpora.append(tfds_corpus.TFDSCorpus.Params(dataset=name, **folder))
    if values.django:
        corpora.append(django_catalogues.Django.Params())
    if not corpora:
        raise errors.ParamsError(
            "there is no corpus. Use --translate_folder, --aligned, --tsv, --tfds or --django"
        )
    return corpora


def _preparation(values: argparse.Namespace) -> preparation.Preparation.Params:
    """Return the Params that the flags describe.

    Raises:
        ParamsError: an override names no field, or its value does not fit.
    """
    params = preparation.Preparation.Params(
        corpora=_corpora(values),
        pairs=() if values.pairs is None else tuple(values.pairs.split(",")),
        vocabulary_file=values.vocabulary_file,
    )
    if values.vocabulary_size is not None:
        params.vocabulary.size = values.vocabulary_size
    for assignment in values.override:
        params.override(assignment)
    return params


def run(argv: Sequence[str]) -> int:
    """Run the command with arguments `argv` (without the program's name); return the exit code."""
    return output.exit_code(lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    values = flags().read(argv)
    if values.output is None:
        raise errors.ParamsError("--output=FOLDER is missing: the folder of the records")
    preparing = _preparation(values).instantiate()
    prepared = preparing.run(values.output, report=output.report, num_threads=values.threads)
    output.report(
        f"{prepared.folder}: {units.things(len(prepared.pairs), 'pair')} of languages, complete"
    )
    return 0


def main() -> None:
    """Run the command line's arguments and end the process."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
