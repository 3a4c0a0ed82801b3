"""Files of a run that a host does not see are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lingvo_gpipe.cluster.checks import sharing
from tests.lingvo_gpipe.cluster.runs import (
    LIMIT_S,
    Run,
)


def test_files_of_a_probe_that_was_interrupted_are_removed(run: Run) -> None:
    shared = run.folder / "shared"
    shared.mkdir()
    left = [shared / f"shared-{'0' * 16}", shared / f"shared-{'0' * 16}.{'1' * 8}"]
    mine = shared / "shared-notes.txt"
    for path in (*left, mine):
        path.write_text("")
    run.start_all()
    assert run.codes() == {"supervisor": 0, "supervisor0": 0, "supervisor1": 0}
    assert list(shared.iterdir()) == [mine]


# Flag → content of the files on the chief's host and on that of worker 1; None: it has the same
# ones. Then the line's end; None: the run is done.
UNSEEN: dict[str, tuple[str, str | None, str | None]] = {
    "LOGDIR": (
        "",
        "",
        "does not see what the chief sees there. Name a folder that all hosts share, by the same "
        "path",
    ),
    "CHECKPOINT": (
        "five",
        "",
        "does not see what the chief sees there. Name one in a folder that all hosts share, by the "
        "same path",
    ),
    "CHECKPOINT of another run": ("five", "of another", "has another one there. Name one in a .*"),
    "CHECKPOINT copied": ("five", "five", None),
    "CHECKPOINT shared": ("five", None, None),
    "CHECKPOINT that the chief does not see": ("", None, None),  # the chief says it itself
}


@pytest.mark.parametrize("case", UNSEEN)
def test_files_that_a_host_does_not_see_are_named(run: Run, case: str) -> None:
    mine, other, expected = UNSEEN[case]
    flag = case.partition(" ")[0]
    hosts = [run.folder / "host0", run.folder / "host1"]
    for host, content in zip(hosts, (mine, other), strict=True):
        (host / "files").mkdir(parents=True)
        if content:
            for name in ("ckpt-5.index", "ckpt-5.params.txt", "ckpt-40.writing"):
                (host / "files" / name).write_text(content)
    before = sorted(run.folder.rglob("files/*"))
    run.start_worker(0, cwd=hosts[0])
    run.start_worker(1, cwd=hosts[0 if other is None else 1])
    run.start_chief(cwd=hosts[0], **{flag: "files"})
    code = run.code("supervisor")
    assert sorted(run.folder.rglob("files/*")) == before
    if expected is None:
        assert code == 0
        return
    assert code == 1
    (line,) = run.lines()
    where = rf"--{flag.lower()}=files: worker 1 \(\S+, process \d+\)"
    assert re.fullmatch(rf"DeviceError: {where} {expected}", line), line
    assert not (run.folder / "went").exists()


def test_a_folder_that_a_host_does_not_share_is_named(tmp_path: Path) -> None:
    def ask(folder: object, name: str, digest: str | None = None) -> str | None:
        return sharing.look(sharing.Question(str(folder), name, digest))

    (tmp_path / "seen").write_text("")
    assert ask(tmp_path, "seen") is None
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]
    assert ask(tmp_path, "other") == "does not see what the chief sees there"
    assert ask("/proc/self", "status") == "cannot write there: No such file or directory"
    assert ask(tmp_path, "../seen") == "'../seen' is not the name of a file"
    look = sharing.Look(sharing.Question(str(tmp_path), "other"))
    assert look.done.wait(LIMIT_S)
    assert look.fault == "does not see what the chief sees there"


def test_the_checkpoint_that_is_looked_for_is_the_newest_whole_one(tmp_path: Path) -> None:
    assert sharing.of_checkpoint(tmp_path) is None
    for name in ("ckpt-9", "ckpt-10"):
        (tmp_path / f"{name}.index").write_text(name)
        (tmp_path / f"{name}.params.txt").write_text("")
    (tmp_path / "ckpt-11.index").write_text("is being written")
    found = sharing.of_checkpoint(tmp_path)
    assert found is not None
    assert found.name == "ckpt-10.index"
    for name in ("ckpt-10", "ckpt-10.index", "ckpt-10.params.txt"):
        assert sharing.of_checkpoint(tmp_path / name) == found
    assert sharing.look(found) is None
    assert sharing.of_checkpoint(tmp_path / "ckpt-12") is None
