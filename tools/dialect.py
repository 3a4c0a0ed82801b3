"""Find words of the project's old dialect in docstrings, comments, texts and documents.

`python -m tools.dialect` prints `path:line: phrase — what to write instead` for each, then how
often each rule matched, and exits with 1 when there are more than `--most` (0 unless it is set).

Prose is: docstrings, comments and string literals of more than one word in `*.py`; `*.md` without
code; comments of shell, Make, Bazel and TOML files. Names between backticks, doctests, fields of
f-strings and addresses of links are code and are not read.

A rule that meets a right use gets a narrower pattern here, with an example of both in its test;
there is no marker to excuse a line.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import dataclasses
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

# These two have to spell the words out.
EXEMPT = frozenset({"tools/dialect.py", "tests/tools/dialect_test.py"})
COMMENTED = frozenset({"Makefile", "BUILD", "WORKSPACE", "requirements.in", "run"})
COMMENTED_SUFFIXES = frozenset({".sh", ".bzl", ".bazel", ".toml", ".yml"})


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A word of the old dialect.

    Attributes:
        name: as it is counted.
        pattern: matched without regard to case in text whose white space is single spaces.
        suggestion: what to write instead.
        begins_docstring: matched in the first paragraph of docstrings only.
    """

    name: str
    pattern: re.Pattern[str]
    suggestion: str
    begins_docstring: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive lines of prose, code in them replaced by `x`.

    Attributes:
        path: relative to the checkout.
        lines: numbers and text.
        begins_docstring: it is the first paragraph of a docstring.
    """

    path: str
    lines: tuple[tuple[int, str], ...]
    begins_docstring: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """One use of a word of the dialect."""

    path: str
    line: int
    text: str
    rule: Rule

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text} — {self.rule.suggestion}"


def _rule(name: str, suggestion: str, *patterns: str) -> Rule:
    return Rule(name, re.compile("|".join(patterns), re.IGNORECASE), suggestion)


RULES = (
    # STYLE.md, section 3: the table.
    _rule("tell", "return, report, log, print, declare", r"\btell(s|ing)?\b"),
    _rule("told", "receives, reported, logged", r"\b((is|are|was|were|be|been) )?told\b"),
    _rule("gives", "returns, produces, computes, adds, names", r"\b(gives|gave)\b"),
    # "Give another --logdir" in an error is plain English; a function that gives is not.
    _rule(
        "give",
        "return, yield, produce, compute",
        r"\b(may|can|could|would|will|which|that|they|not|layers|two|to) give\b"
        r"(?! (another|more)\b)",
        r"\bgiving\b(?! (up|way)\b)",
        r"\b(and|it) gives? back\b",
    ),
    Rule("Give a …", re.compile("^Give [a-z]"), "Return, Yield, Assign", begins_docstring=True),
    _rule(
        "sides of a tensor",
        "dimensions, axes; last axis; height and width",
        r"\b(last|first|second|third|batch|known|unknown|all|every|another|whole|equal|its|largest|"
        r"broadcast|input's|per|or more|all other|this|\d+|x) sides?\b(?! by\b)",
        r"\b(the|of) other sides\b",
        r"\b(the|of|these) sides (all )?(but|differ|fit|may|must|of 1)\b",
        r"\bsides? (along|but|may be -1|of 1|is unknown)\b",
        r"\bbut for one side\b|\bsides: (H|of the input)\b|\bceil\(side\b",
    ),
    _rule("door", "code path, entry point", r"\bdoors?\b"),
    _rule(
        "behind",
        "after, following, below",
        r"(?<!leave )(?<!leaves )(?<!left )(?<!leaving )(?<!hides )(?<!hidden )\bbehind\b"
        r"(?! (a|the) (\w+ )?(flag|proxy|firewall)\b)"
        r"(?<!is behind(?=[,.;]))(?<!are behind(?=[,.;]))",
    ),
    _rule("anew", "again, from scratch", r"\banew\b"),
    _rule(
        "of what",
        "whose, of the values that",
        r"(?<!regardless )(?<!irrespective )(?<!place )(?<!all )(?<!most )(?<!some )(?<!part )"
        r"(?<!nothing )(?<!instead )\bof what\b",
    ),
    _rule(
        "is none",
        "unknown …, is not a …, does not exist",
        r"(?<!there )(?<!here )\b(is|are|was|were) (?-i:none)\b(?! of\b)",
    ),
    _rule("as it is kept", "in the master dtype, as stored", r"\bas (it is|they are) kept\b"),
    _rule("in words", "summary, text", r"\bin words\b"),
    _rule("for people", "human-readable", r"\bfor people\b"),
    _rule(
        "whoever",
        "the reader, caller, process that …",
        r"\bwhoever\b|\b(by|of) who\b|(^|\. )who [a-z]+ (it|them)\b",
    ),
    # Their like.
    _rule(
        "is no …",
        "is not a …",
        r"(?<!there )(?<!here )\b(is|are|was|were) no (?!longer|more|less|better|worse|other|such)",
    ),
    _rule(
        "which it has not",
        "no … 'k'; does not have",
        r"\bwhich (it|they) (has|have) not\b|\b(has|have) not got\b|\b(has|have) not the\b",
    ),
    _rule(
        "stands",
        "is, comes, appears, is placed",
        r"\bstands?\b(?! (for|in for|out|alone|by)\b)",
    ),
    _rule("so many", "the number of, at most N", r"\bso (many|much)\b(?! (that|as|more)\b)"),
    _rule(
        "handed",
        "receives, passes, returns, assigns",
        r"\b(hands|handed|handing)\b(?! side)",
        r"\bto hand\b(?! side)|^Hand (?!-)[a-z]",
    ),
    _rule("in hand", "current", r"\bin hand\b"),
    _rule("reckon", "compute, use, assume", r"\breckon(s|ed|ing)?\b"),
    _rule("in silence", "silently", r"\bin silence\b"),
    _rule("but for", "except", r"\bbut for\b"),
    _rule("as … has it", "as in …", r"\bas ([\w'`]+ ){1,5}(has|have) it\b"),
    _rule("one's own", "your own, custom", r"\bone's own\b"),
    _rule("mend", "fix, correct", r"\bmend(s|ed|ing)?\b"),
    _rule("mishap", "failure", r"\bmishaps?\b"),
    _rule("be had", "is available", r"\b(be|is|are|was|were) had\b"),
    _rule("ends no …", "does not end, does not stop", r"\b(ends?|stops?|costs?) no\b"),
    _rule("wants", "needs", r"(?<!user )\bwants\b"),
    _rule("shall", "must, should, will", r"\bshall\b"),
    _rule("what it comes to", "result", r"\bwhat (\w+ )?(comes|came|come) to\b"),
    _rule("held against", "compared with", r"\bheld against\b"),
    _rule("rooms", "packages", r"(?<!make )(?<!leave )\brooms\b|\bof the house\b"),
)


def occurrences(root: Path) -> list[Match]:
    """Return every use of the dialect in the prose below `root`, by path and line."""
    found: list[Match] = []
    for path in sorted(prose_files(root)):
        for passage in passages(path, (root / path).read_text(encoding="utf-8")):
            found += matches(passage)
    return found


def prose_files(root: Path) -> Iterator[str]:
    """Yield the paths, relative to `root`, of the files whose prose is read."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        names: Iterable[str] = filter(None, listing.stdout.split("\0"))
    else:
        names = (str(path.relative_to(root)) for path in root.rglob("*"))
    for name in set(names) - EXEMPT:
        path = root / name
        known = path.suffix in (".py", ".md") or path.suffix in COMMENTED_SUFFIXES
        if (known or path.name in COMMENTED) and path.is_file() and not path.is_symlink():
            yield name


def passages(path: str, text: str) -> Iterator[Passage]:
    """Yield the prose of a file's `text`; the end of `path` decides how it is read."""
    if path.endswith(".py"):
        kinds = _python(text)
    elif path.endswith(".md"):
        kinds = ((lines, False) for lines in _blocks(_markdown(text)))
    else:
        kinds = ((lines, False) for lines in _blocks(_hash_comments(text)))
    for lines, begins_docstring in kinds:
        prose = tuple((number, _without_code(line)) for number, line in lines)
        yield Passage(path, prose, begins_docstring)


def matches(passage: Passage) -> Iterator[Match]:
    """Yield the uses of the dialect in a passage, in order; a phrase may cross lines."""
    words = [(number, word) for number, line in passage.lines for word in line.split()]
    starts, text = [], ""
    for _, word in words:
        starts.append(len(text))
        text += word + " "
    rules = (rule for rule in RULES if passage.begins_docstring or not rule.begins_docstring)
    found = [(match, rule) for rule in rules for match in rule.pattern.finditer(text)]
    for match, rule in sorted(found, key=lambda pair: pair[0].start()):
        first = bisect.bisect_right(starts, match.start()) - 1
        yield Match(passage.path, words[first][0], match[0].strip(" .,;:("), rule)


Lines = list[tuple[int, str]]


def _blocks(lines: Iterable[tuple[int, str]]) -> Iterator[Lines]:
    """Yield runs of non-empty lines with consecutive numbers."""
    block: Lines = []
    for number, line in lines:
        if block and (number != block[-1][0] + 1 or not line.strip()):
            yield block
            block = []
        if line.strip():
            block.append((number, line))
    if block:
        yield block


def _without_code(line: str) -> str:
    line = re.sub(r"``[^`]*``|`[^`]*`", "`x`", line)
    line = re.sub(r"\]\([^)]*\)|<[^ >][^>]*>|https?://\S+", "", line)
    return line.replace("`x`", "x")


# --- Python ---------------------------------------------------------------------------------------


def _python(text: str) -> Iterator[tuple[Lines, bool]]:
    """Yield docstrings, other strings and comments; each with whether a docstring begins so."""
    tree = ast.parse(text)
    source = [line.encode() for line in text.split("\n")]
    strings, docstrings = [], set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        ):
            strings.append(node)
            continue
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            docstrings.add(id(body[0].value))
        pending += ast.iter_child_nodes(node)
    for string in strings:
        lines = _string(string, source)
        if id(string) in docstrings:
            for block in _blocks(_docstring(lines)):
                yield block, block[0][0] == string.lineno
        elif any(" " in line.strip() for _, line in lines):
            yield lines, False
    for block in _blocks(_python_comments(strings, source)):
        yield block, False


def _python_comments(
    strings: list[ast.Constant | ast.JoinedStr], source: list[bytes]
) -> Iterator[tuple[int, str]]:
    """Yield what follows the first number sign of each line that lies in no string."""
    spans: dict[int, list[tuple[float, float]]] = {}
    for node in strings:
        last = node.end_lineno or node.lineno
        for number in range(node.lineno, last + 1):
            start = node.col_offset if number == node.lineno else 0
            end = (node.end_col_offset or 0) if number == last else math.inf
            spans.setdefault(number, []).append((start, end))
    for number, line in enumerate(source, start=1):
        for sign in re.finditer(b"#", line):
            if not any(start <= sign.start() < end for start, end in spans.get(number, ())):
                yield number, line[sign.end() :].decode().lstrip("#! ")
                break


def _string(node: ast.Constant | ast.JoinedStr, source: list[bytes]) -> Lines:
    """Return what a string literal says, line by line, without quotes and fields in braces."""
    first, last = node.lineno, node.end_lineno or node.lineno
    lines = []
    for number in range(first, last + 1):
        line = source[number - 1]
        if number == last:
            line = line[: node.end_col_offset]
        if number == first:
            line = line[node.col_offset :]
        text = re.sub(r"\{[^{}]*\}", "x", line.decode())
        text = re.sub(r'^\s*[rbuf]{0,2}("""|\'\'\'|"|\')', "", text, flags=re.IGNORECASE)
        text = re.sub(r'("""|\'\'\'|"|\')$', "", text.rstrip())
        lines.append((number, re.sub(r"\\[nrt]", " ", text)))
    return lines


def _docstring(lines: Lines) -> Iterator[tuple[int, str]]:
    """Yield the prose of a docstring: no doctests, no names of arguments."""
    in_example = False
    for number, line in lines:
        if not line.strip():
            in_example = False
        elif line.lstrip().startswith(">>>"):
            in_example = True
        yield number, "" if in_example else re.sub(r"^\s+\*{0,2}[a-z_]\w*(?=: )", "x", line)


# --- Markdown and other comments ------------------------------------------------------------------


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    fenced = indented = False
    before = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            line = ""
        elif line.strip():
            indented = line.startswith("    ") and (indented or not before.strip())
        before = line
        yield number, "" if fenced or indented else line


def _hash_comments(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if match := re.search(r"(?:^|\s)##? (.*)", line):
            yield number, match[1]


def main() -> int:
    """Print what was found; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repo", type=Path, default=Path(), help="folder of the checkout")
    parser.add_argument("--count", action="store_true", help="print counts alone, exit with 0")
    parser.add_argument("--most", type=int, default=0, help="exit with 1 when there are more")
    arguments = parser.parse_args()
    found = occurrences(arguments.repo)
    too_many = len(found) > arguments.most
    if too_many and not arguments.count:
        for match in found:
            print(match)
    if too_many or arguments.count:
        for name, count in Counter(match.rule.name for match in found).most_common():
            print(f"{count:6} {name}")
        print(f"{len(found):6} in all; at most {arguments.most} are allowed")
    return int(too_many and not arguments.count)


if __name__ == "__main__":
    sys.exit(main())
