"""Downloading and preparing a dataset of TFDS, or saying in seconds that there is no network."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import shutil
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from absl import logging

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import local

_MAX_HOSTS = 8
_ANSWER_S = 5.0
_DEADLINE_S = 8.0  # a look-up of a host's name has no limit of its own
_FAILED_GATEWAYS = (502, 503, 504)
_PARTIAL = ".tmp."  # in the name of a folder of a download


def builder_of(name: str, data_dir: str) -> Any:
    """Return the builder of a dataset.

    Args:
        name: such as `cifar10` or `wmt14_translate/de-en:1.0.0`.
        data_dir: folder of its datasets; `~` is that of the user.

    Raises:
        InputError: there is no such dataset, or what is prepared of it cannot be read.
    """
    import tensorflow_datasets as tfds  # takes seconds, and few inputs need it

    try:
        return tfds.builder(name, data_dir=os.path.expanduser(data_dir))
    except tfds.core.DatasetNotFoundError:
        # TFDS' own message lists its whole catalogue.
        known = tfds.list_builders(with_community_datasets=False)
        near = errors.nearest(re.split("[/:]", name)[0], known)
        hint = f"nearest {', '.join(near)}" if near else f"it knows {len(known)} others"
        raise errors.InputError(f"TFDS has no dataset {name!r}; {hint}") from None
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise errors.InputError(f"TFDS dataset {name!r}: {first_line(error)}") from error
    except Exception as error:  # such as one of protobuf, for a file that is cut short
        why = errors.cause(error, __file__)
        raise errors.InputError(f"TFDS dataset {name!r}: {why}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; its kind, if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def prepare(builder: Any, data_dir: str) -> None:
    """Download and prepare a dataset, leaving no partial files if that fails.

    TFDS itself tries a host for 3.4 minutes. Here the hosts of its files are asked once before.

    Args:
        builder: a `tfds.core.DatasetBuilder`.
        data_dir: folder of its datasets.

    Raises:
        NoNetworkError: no host answers, and nothing is downloaded yet, or this process is in a
            private network, where no host ever answers.
        Exception: whatever the builder raises.
    """
    check_network(builder, data_dir)
    before = _folders(builder.name, data_dir)
    try:
        builder.download_and_prepare()
    except BaseException:
        for path in sorted(_folders(builder.name, data_dir) - before, reverse=True):
            if _PARTIAL in path.name:
                shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):  # it is not empty, or gone
                path.rmdir()
        raise


def check_network(builder: Any, data_dir: str) -> None:
    """Refuse to download a dataset whose hosts do not answer; see `prepare`.

    Raises:
        NoNetworkError: as `prepare` does.
    """
    urls = list(builder.url_infos or ())
    if urls and (fault := network_fault(urls)) is not None:
        if local.is_private() or not _has_downloads(builder, data_dir):
            raise errors.NoNetworkError(f"there is no network ({fault})")
        logging.warning(
            "there is no network (%s): TFDS tries for minutes to download what it lacks", fault
        )


def network_fault(urls: Iterable[str]) -> str | None:
    """Return why no host of `urls` answers, in seconds; None: one does.

    Args:
        urls: addresses; only some of their hosts are asked, at the same time.
    """
    url_of = {urllib.parse.urlsplit(url).netloc: url for url in urls if "://" in url}
    asked = dict(list(url_of.items())[:_MAX_HOSTS])
    futures: dict[concurrent.futures.Future[str | None], str] = {}
    for host, url in asked.items():
        future: concurrent.futures.Future[str | None] = concurrent.futures.Future()
        futures[future] = host
        # A daemon: a look-up of a name cannot be interrupted, and would delay the process' end.
        threading.Thread(target=_ask, args=(url, future), daemon=True).start()
    faults = []
    try:
        for future in concurrent.futures.as_completed(futures, timeout=_DEADLINE_S):
            fault = future.result()
            if fault is None:
                return None
            faults.append(f"{futures[future]}: {fault}")
    except TimeoutError:
        faults.append(f"no answer in {_DEADLINE_S:g} s")
    return min(faults) if faults else None


def _ask(url: str, answer: concurrent.futures.Future[str | None]) -> None:
    """Ask a host for a file's headers; set None if it answers, else the reason of the failure."""
    request = urllib.request.Request(url, method="HEAD")
    fault: str | None = None
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S):
            pass
    except urllib.error.HTTPError as error:  # an answer, unless of a gateway that found no host
        fault = str(error) if error.code in _FAILED_GATEWAYS else None
    except urllib.error.URLError as error:
        reason = error.reason
        fault = str(getattr(reason, "strerror", None) or reason)
    except Exception as error:  # noqa: BLE001 - a library's error: the reason of no answer
        fault = str(error) or type(error).__name__
    answer.set_result(fault)


def _has_downloads(builder: Any, data_dir: str) -> bool:
    """Return whether a file was downloaded before, by hand for the dataset, or by TFDS for any.

    Newer versions of TFDS have a folder for each dataset, older ones one for all.
    """
    downloads = Path(data_dir, "downloads")
    named = {info.filename for info in builder.url_infos.values()}
    with contextlib.suppress(OSError):
        by_hand = set(os.listdir(downloads / "manual"))
        if named & by_hand or (by_hand and builder.MANUAL_DOWNLOAD_INSTRUCTIONS):
            return True
    # TFDS writes .INFO beside a file that is complete.
    return any(downloads.glob("*.INFO")) or any((downloads / builder.name).rglob("*.INFO"))


def _folders(name: str, data_dir: str) -> set[Path]:
    """Return the folders that preparing the dataset `name` makes, as far as they exist."""
    root = Path(data_dir)
    tops = (root, root / "downloads", root / "downloads" / name, root / name)
    inside = (path for top in tops[2:] for path in top.rglob("*"))
    return {path for path in (*tops, *inside) if path.is_dir()}
