r"""Makes a folder of records: corpora → vocabulary → ids.

    python -m lingvo_gpipe.tasks.mt.prepare --output=records/m30k \
        --aligned=en,de:train=train.en.gz,train.de.gz --aligned=en,de:test=test.en.gz,test.de.gz

It ends with 0 when done, 1 after a user's mistake (one line, no traceback), 130 after Ctrl-C. Work
that was not finished leaves nothing under the output's name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from lingvo_gpipe import errors
from lingvo_gpipe.console import command, output
from lingvo_gpipe.console.flags import Flags
from lingvo_gpipe.tasks.mt.text import catalogues, corpus, preparation, tfds_corpus

_USAGE = """\
Makes a folder of records, from which translation models are trained, of corpora.

  python -m lingvo_gpipe.tasks.mt.prepare --output=FOLDER --translate_folder=FOLDER …
"""


def _flags() -> Flags:
    """Return the command's flags."""
    known = Flags(_USAGE)
    known.text("output", "Folder of records to make.")
    known.repeated("translate_folder", "Corpus: a folder of LANG.SPLIT.txt, or of such folders.")
    known.repeated("aligned", "Corpus: plain files, en,de:SPLIT=PATH,PATH; a split at a time.")
    known.repeated(
        "tsv", "Corpus: files with tabs, en,de:SPLIT=PATH or a glob, one language a column."
    )
    known.repeated("tfds", "Corpus: a TFDS translation dataset, such as wmt14_translate/de-en.")
    known.switch("django", "Corpus: Django's message catalogues.")
    known.text("tfds_dir", "Where TFDS keeps its datasets.")
    known.several("pairs", "Pairs of languages: de:en,en:de. All to English if none.")
    known.repeated(
        "override",
        "Sets a field of the preparation: PATH=VALUE, such as vocabulary.size=8000; "
        "policy.empty=fail sets it for every corpus.",
    )
    known.number("vocabulary_size", "Pieces at most; 64,000 if not given.")
    known.text("vocabulary_file", "A .model file to take in place of a trained one.")
    known.number("threads", "That tokenise; one for each core if not given. Changes no bit.")
    return known


def _read_flags(argv: Sequence[str]) -> argparse.Namespace | None:
    """Return the flags of `argv`; None where it asked for help, which is printed.

    Raises:
        ParamsError: a flag is unknown, misspelt, or has a value of the wrong kind; or the output
            is missing.
    """
    values = _flags().read(argv)
    if values is not None and values.output is None:
        raise errors.ParamsError("--output=FOLDER is missing: where the records shall be")
    return values


def _parts(flag: str, given: str) -> tuple[tuple[str, ...], str, str]:
    """Cut `en,de:train=PATH` into languages, split and the rest."""
    head, equals, rest = given.partition("=")
    languages, colon, split = head.rpartition(":")
    if not (equals and colon and languages and split and rest):
        raise errors.ParamsError(
            f"--{flag}={given} is not of the form LANG,LANG:SPLIT=PATH, such as "
            f"--{flag}=en,de:train=train.tsv"
        )
    return tuple(languages.split(",")), split, rest


def _corpora(values: argparse.Namespace) -> list[Any]:
    """Return the Params of every corpus that the flags name."""
    found: list[Any] = [
        corpus.TranslateFolder.Params(folder=folder) for folder in values.translate_folder
    ]
    aligned: dict[tuple[str, ...], list[dict[str, dict[str, str]]]] = {}
    for given in values.aligned:
        languages, split, rest = _parts("aligned", given)
        paths = rest.split(",")
        if len(paths) != len(languages):
            raise errors.ParamsError(
                f"--aligned={given} has {len(paths)} files for {len(languages)} languages"
            )
        _put(aligned.setdefault(languages, []), split, dict(zip(languages, paths, strict=True)))
    found += [corpus.Aligned.Params(files=files) for each in aligned.values() for files in each]
    tables: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for given in values.tsv:
        languages, split, path = _parts("tsv", given)
        _put(tables.setdefault(languages, []), split, path)
    found += [
        corpus.TSV.Params(languages=languages, files=files)
        for languages, each in tables.items()
        for files in each
    ]
    for name in values.tfds:
        own = {} if values.tfds_dir is None else {"tfds_dir": values.tfds_dir}
        found.append(tfds_corpus.TFDS.Params(dataset=name, **own))
    if values.django:
        found.append(catalogues.Django.Params())
    if not found:
        raise errors.ParamsError(
            "no corpus is given. Give --translate_folder, --aligned, --tsv, --tfds or --django"
        )
    return found


def _put(groups: list[dict[str, Any]], split: str, files: Any) -> None:
    """Put the files of a split into the first group that has none of it: a second is a corpus."""
    for group in groups:
        if split not in group:
            group[split] = files
            return
    groups.append({split: files})


def _preparation(values: argparse.Namespace) -> Any:
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
    """Do what the arguments `argv` (without the program's name) ask; return the exit code."""
    return command.exit_code(lambda: _run(argv))


def _run(argv: Sequence[str]) -> command.Exit:
    # The records are in their folder, whatever becomes of the lines.
    done = command.Exit(output_required=False)
    values = _read_flags(argv)
    if values is None:
        return done
    preparing = _preparation(values).instantiate()
    made = preparing.run(values.output, report=_report, num_threads=values.threads)
    _report(f"{made.folder}: {len(made.pairs)} pairs of languages, whole")
    return done


def main() -> None:
    """Run the command line's arguments and end the process."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
