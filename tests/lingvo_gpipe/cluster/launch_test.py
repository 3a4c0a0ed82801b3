"""What the trainer's flags ask for: one line for each mistake, before TensorFlow is imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lingvo_gpipe import trainer
from lingvo_gpipe.cluster import launch, members
from tests.support import programs

JOBS = {"chief": ["127.0.0.1:21"], "worker": ["127.0.0.1:22", "127.0.0.1:23"]}
FILES: dict[str, bytes] = {
    "cluster.json": json.dumps({"cluster": JOBS}).encode(),
    "token": b"secret",
    "empty": b" \n",
}

# Flags ({} is the folder of FILES) → the line.
MISTAKES = {
    "--workers=2": r"--workers=2: expected local:N or open:N, such as local:2. .*",
    "--workers=local:2 --job=worker": r"--workers=local:2 starts the workers itself: leave out .*",
    "--workers=local:2 --cluster={}/cluster.json": r"--workers=local:2 starts workers here, but .*",
    "--job=worker": r"--job=worker: of which cluster\? Set TF_CONFIG, or name its file by .*",
    "--task=7": r"--task=7: of which cluster\? .*",
    "--cluster={}": r"--cluster=\S+ cannot be read: Is a directory",
    "--cluster={}/cluster.json": r"a cluster needs a secret that all of its processes know: .*",
    "--cluster={}/cluster.json --token_file={}/empty": r"a cluster needs a secret .*",
    "--cluster={}/cluster.json --token_file={}/no": r"--token_file=\S+ cannot be read: No such .*",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    for name in (members.VARIABLE, launch.TOKEN):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_one_line(flags: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert trainer.run(flags.replace("{}", str(folder)).split()) == 1
    out, err = capfd.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert re.fullmatch(f"DeviceError: {MISTAKES[flags]}", line), line


def test_tf_config_and_local_workers_exclude_each_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(members.VARIABLE, (folder / "cluster.json").read_text())
    assert trainer.run(["--workers=local:2"]) == 1
    assert "--cluster or TF_CONFIG names others" in capfd.readouterr().err


def test_a_worker_of_which_a_mode_needs_none_ends(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--cluster={folder}/cluster.json", "--job=worker", "--task=1", "--mode=export"]
    assert trainer.run(flags) == 0
    assert capfd.readouterr().err == (
        "worker 1 has nothing to do: what was asked for needs the chief alone\n"
    )


def test_the_secret_is_in_no_command_line_and_tensorflow_is_not_needed(folder: Path) -> None:
    cluster = folder / "one.json"
    cluster.write_text(json.dumps({"chief": ["127.0.0.1:9999"], "worker": ["127.0.0.1:1"]}))
    (folder / "token").write_text("a very secret word é")
    flags = [f"--cluster={cluster}", f"--token_file={folder / 'token'}", "--start_timeout_s=0"]
    program = (
        "import sys\n"
        "from lingvo_gpipe import trainer\n"
        "code = trainer.run(sys.argv[1:])\n"
        "assert 'tensorflow' not in sys.modules\n"
        "sys.exit(code)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, *flags, "--model=none", f"--logdir={folder}"],
        stderr=subprocess.PIPE,
        text=True,
        env=programs.environment(),
    ) as supervisor:
        try:
            words = set()
            while supervisor.poll() is None:
                for path in Path("/proc").glob("[0-9]*/cmdline"):
                    try:
                        words.add(path.read_bytes())
                    except OSError:
                        continue
            _, err = supervisor.communicate(timeout=30)
        finally:
            supervisor.kill()
    assert any(b"one.json" in line for line in words)
    assert not any(b"secret word" in line for line in words)
    assert supervisor.returncode == 1
    assert err.startswith("DeviceError: worker 0 (127.0.0.1:1) is missing after 0 s")
    assert "secret word" not in err
