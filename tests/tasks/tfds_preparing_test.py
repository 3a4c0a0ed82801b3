"""Without a network TFDS is not asked to download, and what it leaves of a download is removed."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.tasks import tfds_preparing
from lingvo_gpipe.tasks.image import TFDS
from lingvo_gpipe.tasks.mt.text.corpora import tfds_corpus


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers with the number in the path."""

    def do_HEAD(self) -> None:
        self.send_error(int(self.path.strip("/")))

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(name="host")
def make_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(name="closed")
def make_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A port at which nobody listens."""
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_a_network_is_there_where_one_host_answers(host: str, closed: str) -> None:
    for number in (200, 302, 403, 404, 500):
        assert tfds_preparing.network_fault([f"{host}/{number}"]) is None
    assert tfds_preparing.network_fault([f"{closed}/a", f"{host}/404"]) is None
    assert tfds_preparing.network_fault([]) is None
    assert tfds_preparing.network_fault(["no address"]) is None
    fault = tfds_preparing.network_fault([f"{closed}/a", f"{closed}/b"])
    assert fault == f"{closed.removeprefix('http://')}: Connection refused"
    fault = tfds_preparing.network_fault([f"{host}/503"])
    assert fault is not None
    assert "HTTP Error 503" in fault


def test_a_host_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfds_preparing, "_DEADLINE_S", 0.01)
    monkeypatch.setattr(tfds_preparing, "_ask", lambda *_: None)
    assert tfds_preparing.network_fault(["http://a/b"]) == "no answer in 0.01 s"


def builder(*urls: str, by_hand: str = "") -> Any:
    """Return a builder that is cut off while it downloads."""
    infos = {url: SimpleNamespace(filename=url.rsplit("/")[-1]) for url in urls}
    made = SimpleNamespace(name="shapes", url_infos=infos, MANUAL_DOWNLOAD_INSTRUCTIONS=by_hand)

    def download_and_prepare() -> None:
        folder = made.data_dir / "downloads" / "shapes" / "a.tar.tmp.0123"
        folder.mkdir(parents=True)
        (folder / "a.tar").write_bytes(b"half")
        (made.data_dir / "shapes" / "1.0.0").mkdir(parents=True)
        raise RuntimeError("cut off")

    made.download_and_prepare = download_and_prepare
    return made


def test_without_a_network_nothing_is_tried(
    closed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = builder(f"{closed}/a.tar")
    made.data_dir = tmp_path
    with pytest.raises(ConnectionError, match=r"there is no network \(.*: Connection refused\)"):
        tfds_preparing.prepare(made, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    downloads = tmp_path / "downloads"
    for path in (
        downloads / "manual" / "a.tar",
        downloads / "shapes" / "a.tar.INFO",
        downloads / "a.tar.INFO",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        caplog.clear()
        with pytest.raises(RuntimeError, match="cut off"):
            tfds_preparing.prepare(made, str(tmp_path))
        assert "TFDS tries for minutes to download what it lacks" in caplog.text
        path.unlink()


def test_what_a_download_leaves_is_removed_and_nothing_else(host: str, tmp_path: Path) -> None:
    made = builder(f"{host}/404")
    made.data_dir = tmp_path / "tfds"
    with pytest.raises(RuntimeError, match="cut off"):
        tfds_preparing.prepare(made, str(made.data_dir))
    assert list(tmp_path.iterdir()) == []
    others = made.data_dir / "downloads" / "shapes" / "b.tar.tmp.0456"
    others.mkdir(parents=True)
    (made.data_dir / "downloads" / "shapes" / "c.tar").touch()
    with pytest.raises(RuntimeError, match="cut off"):
        tfds_preparing.prepare(made, str(made.data_dir))
    names = {path.name for path in tmp_path.rglob("*")}
    assert names == {"tfds", "downloads", "shapes", "b.tar.tmp.0456", "c.tar"}


def test_files_that_are_fetched_by_hand_need_no_network(closed: str, tmp_path: Path) -> None:
    made = builder(f"{closed}/b.tar", by_hand="fetch a.tar")
    made.data_dir = tmp_path
    with pytest.raises(ConnectionError):
        tfds_preparing.prepare(made, str(tmp_path))
    (tmp_path / "downloads" / "manual").mkdir(parents=True)
    (tmp_path / "downloads" / "manual" / "a.tar").touch()
    with pytest.raises(RuntimeError, match="cut off"):
        tfds_preparing.prepare(made, str(tmp_path))


def read_images(folder: Path) -> None:
    params = TFDS.Params(name="cifar10", data_dir=str(folder), batch_size=1, height=2, width=2)
    params.instantiate().num_examples("train")


def read_text(folder: Path) -> None:
    name = "wmt14_translate/de-en"
    corpus = tfds_corpus.TFDSCorpus.Params(dataset=name, tfds_dir=str(folder)).instantiate()
    assert corpus.splits


@pytest.mark.parametrize("read", [read_images, read_text])
def test_a_dataset_without_a_network_is_reported_in_one_line(
    read: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfds_preparing, "network_fault", lambda urls: f"{len(urls)} urls")
    folder = tmp_path / "tfds"
    with pytest.raises(errors.InputError) as caught:
        read(folder)
    text = f" is not prepared in {folder}, and preparing it failed: there is no network ("
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
