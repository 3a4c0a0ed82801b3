"""The lines that a command prints, and its exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.console import output


def test_a_mistake_is_printed_by_the_class_users_know(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(errors.UserError) as caught:
        hyperparams.Configurable.Params().get("x")
    assert type(caught.value) is not errors.ParamsError
    assert output.mistake(caught.value).startswith("ParamsError: ")
    output.report("a line")
    assert capsys.readouterr().out == "a line\n"


def test_a_message_of_tensorflow_is_quoted_without_names_of_its_graphs() -> None:
    quoted = "{{function_node __wrapped__SaveV2_dtypes_3_device_/job:w/device:CPU:0}} a/b: No space"
    error = errors.CheckpointError(f"runs: ({quoted} [Op:SaveV2] name: ); free {{some}} space")
    assert output.mistake(error) == "CheckpointError: runs: (a/b: No space); free {some} space"


@pytest.mark.parametrize(
    ("encoding", "told"),
    [
        ("utf-8", "runs/gr\\udcfcn → ü"),
        ("latin-1", "runs/gr\\udcfcn \\u2192 ü"),
        ("ascii", "runs/gr\\udcfcn \\u2192 \\xfc"),
    ],
)
def test_what_the_outputs_encoding_lacks_is_printed_with_backslashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, told: str
) -> None:
    path = os.fsdecode(b"runs/gr\xfcn")
    with open(tmp_path / "out", "w", encoding=encoding) as out:
        monkeypatch.setattr(sys, "stdout", out)
        output.report(f"{path} → ü")
    assert (tmp_path / "out").read_text(encoding=encoding) == f"{told}\n"


def test_a_full_disk_under_the_output_does_not_end_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, show in (("stdout", output.report), ("stderr", output.note)):
        with open("/dev/full", "w", encoding="utf-8") as full:
            monkeypatch.setattr(sys, name, full)
            show("a line")
            os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_command_ends_with_the_code_of_its_work(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise errors.InputError("no such file")

    def interrupt() -> int:
        raise KeyboardInterrupt

    assert output.exit_code(lambda: 3) == 3
    assert output.exit_code(interrupt) == 128 + signal.SIGINT
    assert output.exit_code(refuse) == 1
    assert capsys.readouterr().err == "InputError: no such file\n"


PRINTS_A_LINE = """
from lingvo_gpipe.console import output
raise SystemExit(output.exit_code(lambda: output.report("a line") or 0))
"""


def test_a_reader_that_leaves_is_not_a_fault() -> None:
    """Nor when the interpreter writes the rest of its output at its end."""
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-c", PRINTS_A_LINE]
    found = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (found.returncode, found.stderr) == (128 + signal.SIGPIPE, "")
