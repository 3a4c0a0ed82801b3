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
from typing import TypeAlias, TypeVar

from lingvo_gpipe import errors
from lingvo_gpipe.console import command, output, units
from lingvo_gpipe.console.flags import Flags
from lingvo_gpipe.tasks.mt.text import preparation
from lingvo_gpipe.tasks.mt.text.corpora import django_catalogues, text_files, tfds_corpus
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Corpus

LanguageList: TypeAlias = tuple[str, ...]

_Files = TypeVar("_Files")

_USAGE = """\
Makes a folder of records from corpora, to train translation models on.

  python -m lingvo_gpipe.tasks.mt.prepare --output=FOLDER --translate_folder=FOLDER …
"""


def _flags() -> Flags:
    """Return the command's flags."""
    known = Flags(_USAGE)
    known.text("output", "Folder of records to make.")
    known.repeated("translate_folder", "Corpus: a folder of LANG.SPLIT.txt, or of such folders.")
    known.repeated("aligned", "Corpus: aligned files of one split, en,de:SPLIT=PATH,PATH.")
    known.repeated(
        "tsv", "Corpus: files with tabs, en,de:SPLIT=PATH or a glob, one language per column."
    )
    known.repeated("tfds", "Corpus: a TFDS translation dataset, such as wmt14_translate/de-en.")
    known.switch("django", "Corpus: Django's message catalogues.")
    known.text("tfds_dir", "Folder of TFDS datasets.")
    known.several("pairs", "Pairs of languages, de:en,en:de; by default all to English.")
    known.repeated(
        "override",
        "Sets a field of the preparation: PATH=VALUE, such as vocabulary.size=8000; "
        "policy.empty=fail sets it for every corpus.",
    )
    known.number("vocabulary_size", "Maximum number of pieces; by default 64,000.")
    known.text("vocabulary_file", "A .model file to use instead of training a vocabulary.")
    known.number(
        "threads",
        "Threads that tokenise; by default one per core. The records do not depend on it.",
    )
    return known


def _read_flags(argv: Sequence[str]) -> argparse.Namespace | None:
    """Return the flags of `argv`, or None if it asks for help, which is printed.

    Raises:
        ParamsError: a flag is unknown, misspelt, or has a value of the wrong kind; or the output
            is missing.
    """
    values = _flags().read(argv)
    if values is not None and values.output is None:
        raise errors.ParamsError("--output=FOLDER is missing: the folder of the records")
    return values


def _parts(flag: str, value: str) -> tuple[LanguageList, str, str]:
    """Split `en,de:train=PATH` into languages, split and path."""
    head, equals, rest = value.partition("=")
    languages, colon, split = head.rpartition(":")
    if not (equals and colon and languages and split and rest):
        raise errors.ParamsError(
            f"--{flag}={value} is not of the form LANG,LANG:SPLIT=PATH, such as "
            f"--{flag}=en,de:train=train.tsv"
        )
    return tuple(languages.split(",")), split, rest


def _corpora(values: argparse.Namespace) -> list[Corpus.Params]:
    """Return the Params of every corpus that the flags name."""
    corpora: list[Corpus.Params] = [
        text_files.TranslateFolder.Params(folder=folder) for folder in values.translate_folder
    ]
    aligned: dict[LanguageList, list[dict[str, dict[str, str]]]] = {}
    for value in values.aligned:
        languages, split, rest = _parts("aligned", value)
        paths = rest.split(",")
        if len(paths) != len(languages):
            raise errors.ParamsError(
                f"--aligned={value} has {len(paths)} files for {len(languages)} languages"
            )
        _add(aligned.setdefault(languages, []), split, dict(zip(languages, paths, strict=True)))
    corpora += [
        text_files.Aligned.Params(files=files) for groups in aligned.values() for files in groups
    ]
    tables: dict[LanguageList, list[dict[str, str]]] = {}
    for value in values.tsv:
        languages, split, path = _parts("tsv", value)
        _add(tables.setdefault(languages, []), split, path)
    corpora += [
        text_files.TSV.Params(languages=languages, files=files)
        for languages, groups in tables.items()
        for files in groups
    ]
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


def _add(corpora: list[dict[str, _Files]], split: str, files: _Files) -> None:
    """Add the files of a split to the first corpus that lacks this split, or to a new corpus."""
    for corpus in corpora:
        if split not in corpus:
            corpus[split] = files
            return
    corpora.append({split: files})


def _preparation(values: argparse.Namespace) -> preparation.Preparation.Params:
    """Return the Params that the flags describe.

    Raises:
        ParamsError: an override names no field, or its value does not fit.
    """
    params = preparation.Preparation.Params(
        corpora=_corpora(values), pairs=tuple(values.pairs), vocabulary_file=values.vocabulary_file
    )
    if values.vocabulary_size is not None:
        params.vocabulary.size = values.vocabulary_size
    for assignment in values.override:
        if assignment.startswith("policy."):
            for number in range(len(params.corpora)):
                params.override(f"corpora[{number}].{assignment}")
        else:
            params.override(assignment)
    return params


def _report(line: str) -> None:
    """Print a line; preparation continues if the output's reader has ended (head, a pager)."""
    try:
        output.report(line)
    except BrokenPipeError:
        output.drop()


def run(argv: Sequence[str]) -> int:
    """Run the command with arguments `argv` (without the program's name); return the exit code."""
    return command.exit_code(lambda: _run(argv))


def _run(argv: Sequence[str]) -> command.Exit:
    # The records are complete, even if the lines cannot be printed.
    done = command.Exit(output_required=False)
    values = _read_flags(argv)
    if values is None:
        return done
    preparing = _preparation(values).instantiate()
    made = preparing.run(values.output, report=_report, num_threads=values.threads)
    _report(f"{made.folder}: {units.things(len(made.pairs), 'pair')} of languages, complete")
    return done


def main() -> None:
    """Run the command line's arguments and end the process."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
