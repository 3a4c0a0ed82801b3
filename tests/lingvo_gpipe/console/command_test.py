"""The lines that a command prints, and its exit codes."""

from __future__ import annotations

import functools
import os
import signal
import sys
from pathlib import Path

import pytest

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.console import command, output


def test_a_mistake_is_printed_by_the_class_users_know(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(errors.UserError) as caught:
        hyperparams.Configurable.Params().get("x")
    assert type(caught.value) is not errors.ParamsError
    assert command.mistake(caught.value).startswith("ParamsError: ")
    output.report("a line")
    assert capsys.readouterr().out == "a line\n"


def test_a_message_of_tensorflow_is_quoted_without_names_of_its_graphs() -> None:
    quoted = "{{function_node __wrapped__SaveV2_dtypes_3_device_/job:w/device:CPU:0}} a/b: No space"
    error = errors.CheckpointError(f"runs: ({quoted} [Op:SaveV2] name: ); free {{some}} space")
    assert command.mistake(error) == "CheckpointError: runs: (a/b: No space); free {some} space"


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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        output.report("a line")
        output.finish()
    assert capsys.readouterr().err == (
        "the end of the output cannot be written: No space left on device\n"
    )
    with open("/dev/full", "w", encoding="utf-8", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        output.note("a line")
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_reader_that_has_ended_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        with pytest.raises(BrokenPipeError):
            output.report("a line")
        with pytest.raises(BrokenPipeError):
            output.finish()
        output.drop()


def test_a_command_ends_with_the_code_of_its_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> command.Exit:
        raise errors.InputError("no such file")

    def interrupt() -> command.Exit:
        raise KeyboardInterrupt

    assert command.exit_code(lambda: command.Exit(3)) == 3
    assert command.exit_code(interrupt) == 128 + signal.SIGINT
    assert command.exit_code(refuse) == 1
    assert capsys.readouterr().err == "InputError: no such file\n"
    for required, code in ((True, 1), (False, 0)):
        with open("/dev/full", "w", encoding="utf-8") as full:
            monkeypatch.setattr(sys, "stdout", full)
            full.write("a line")
            work = functools.partial(command.Exit, output_required=required)
            assert command.exit_code(work) == code
