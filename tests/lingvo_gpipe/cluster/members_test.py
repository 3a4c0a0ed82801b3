"""TF_CONFIG, files of a cluster and flags: what names one, and the line for what does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import members

JOBS = {"chief": ["a:1"], "worker": ["b:2", "[fe80::1]:3"]}
CLUSTER = members.Cluster("a:1", ("b:2", "[fe80::1]:3"))


def config(cluster: object, task: object = None) -> str:
    return json.dumps({"cluster": cluster} | ({} if task is None else {"task": task}))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Return what reads a value of TF_CONFIG, and flags."""

    def from_environment(value: str | None, *flags: Any) -> object:
        if value is None:
            monkeypatch.delenv(members.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(members.VARIABLE, value)
        return members.read(None, *flags)

    return from_environment


@pytest.mark.parametrize(
    ("task", "job", "index", "member"),
    [
        ({"type": "worker", "index": 1}, None, None, members.Member("worker", 1)),
        ({"type": "worker", "index": "1"}, None, None, members.Member("worker", 1)),
        ({"type": "chief"}, None, None, members.Member("chief")),
        ({"type": "worker", "index": 1}, "worker", 1, members.Member("worker", 1)),
        ({"type": "worker", "index": 1}, "worker", None, members.Member("worker", 1)),
        (None, "worker", 1, members.Member("worker", 1)),
        (None, None, None, members.Member("chief")),
    ],
)
def test_tf_config_names_the_cluster_and_this_process(
    read: Callable[..., object],
    task: object,
    job: str | None,
    index: int | None,
    member: members.Member,
) -> None:
    assert read(config(JOBS, task), job, index) == (CLUSTER, member)


@pytest.mark.parametrize("value", [None, " ", "{}", config({"chief": ["a:1"]}, {"type": "chief"})])
def test_without_a_cluster_there_is_one_process(
    read: Callable[..., object], value: str | None
) -> None:
    assert read(value) is None


def test_what_a_member_is_started_with_is_read_back(read: Callable[..., object]) -> None:
    for member in (members.Member("chief"), members.Member("worker", 1)):
        assert read(CLUSTER.to_config(member)) == (CLUSTER, member)


@pytest.mark.parametrize("values", [JOBS, {"cluster": JOBS}])
def test_a_file_is_read_like_tf_config(tmp_path: Path, values: object) -> None:
    path = str(tmp_path / "cluster.json")
    Path(path).write_text(json.dumps(values))
    assert members.read(path) == (CLUSTER, members.Member("chief"))
    assert members.read(path, "worker", 1) == (CLUSTER, members.Member("worker", 1))
    with pytest.raises(errors.DeviceError, match="Say which one this is: --task=0, 1"):
        members.read(path, "worker")
    with pytest.raises(errors.DeviceError, match="cannot be read: No such file"):
        members.read(str(tmp_path / "missing"))


WRONG = [
    ("{", None, "is not the JSON of a cluster .* Write"),
    ("[]", None, "is not the JSON of a cluster"),
    ('{"cluster": 7}', None, "is not the JSON of a cluster"),
    (config(JOBS, "worker"), None, "is not the JSON of a cluster"),
    (config({"worker": ["b:2"]}), None, "names 0 chiefs. Name one"),
    (config({"chief": ["a:1", "a:2"], "worker": ["b:2"]}), None, "names 2 chiefs"),
    (config({**JOBS, "wroker": ["c:1"]}), None, "no job 'wroker'; nearest 'worker'"),
    (config({"chief": ["a:1"], "worker": ["b"]}), None, "'b' is not an address"),
    (config({"chief": ["a:1"], "worker": ["b:70000"]}), None, "a port from 1 to 65535"),
    (config({"chief": ["a:1"], "worker": [7]}), None, "'7' is not an address"),
    (config({"chief": ["a:1"], "worker": ["a:1"]}), None, "have the same address a:1"),
    (
        config(JOBS, {"type": "worker", "index": 2}),
        None,
        "is worker 2, but .* names 2 workers. Use",
    ),
    (config(JOBS, {"type": "worker", "index": -1}), None, "is worker -1, but"),
    (config(JOBS, {"type": "chief", "index": 1}), None, "is chief 1, but .* names 1 chief. Use 0"),
    (
        config(JOBS, {"type": "worker", "index": 1}),
        ("chief", 0),
        "says that this process is worker 1",
    ),
    (config(JOBS), ("wroker", 0), "there is no job 'wroker'; nearest 'worker'"),
]


@pytest.mark.parametrize(("value", "flags", "expected"), WRONG)
def test_a_wrong_cluster_is_refused_by_one_line(
    read: Callable[..., object], value: str, flags: tuple[str, int] | None, expected: str
) -> None:
    with pytest.raises(errors.DeviceError, match=expected) as caught:
        read(value, *(flags or ()))
    assert "\n" not in str(caught.value)


def test_local_workers() -> None:
    assert members.local_workers("local:12") == ("local", 12)
    assert members.local_workers("open:2") == ("open", 2)
    for text in ("2", "local", "local:0", "local:-1", "remote:2"):
        with pytest.raises(errors.DeviceError, match=r"expected local:N or open:N"):
            members.local_workers(text)
