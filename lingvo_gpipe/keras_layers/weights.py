"""Weights copied from live Keras objects, named by their digest.

Params hold no arrays. A layer that starts from a live layer's weights holds their digest. So its
text names exactly those weights, and two trees with the same initial weights compare equal. The
arrays stay in this process; `save` and `load` transfer them to another.
"""

from __future__ import annotations

import hashlib
import pathlib
import zipfile
import zlib
from collections.abc import Iterable, Mapping

import numpy as np

from lingvo_gpipe import errors, regular_files

# What zipfile and numpy raise of damaged files: RuntimeError where one seems to be encrypted.
_DAMAGED = (
    OSError,
    ValueError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
_kept: dict[str, dict[str, np.ndarray]] = {}


def keep(arrays: Mapping[str, np.ndarray]) -> str:
    """Store a copy of a layer's arrays by path; return the name of the copy."""
    copied = {path: np.array(array) for path, array in sorted(arrays.items())}
    digest = hashlib.sha256()
    for path, array in copied.items():
        digest.update(f"{path} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
        array.flags.writeable = False
    name = f"sha256:{digest.hexdigest()[:32]}"
    _kept[name] = copied
    return name


def find(name: str, path: str) -> np.ndarray:
    """Return one array of a layer.

    Raises:
        LayerError: the arrays were stored in another process, or belong to another layer.
    """
    if name not in _kept:
        raise errors.LayerError(
            f"the weights {name} of a Keras layer are not in this process. Load them by "
            "keras_layers.weights.load, copy them from the live layer by from_keras again, or set "
            "the layer's weights='' for new ones"
        )
    if path not in _kept[name]:
        near = errors.nearest(path, _kept[name]) or sorted(_kept[name])
        raise errors.LayerError(
            f"the weights {name} have no {path!r}; nearest {', '.join(near)}. They belong to "
            "another layer"
        )
    return _kept[name][path]


def save(path: str | pathlib.Path, names: Iterable[str]) -> None:
    """Write the arrays of these names into one .npz file."""
    flat: dict[str, np.ndarray] = {}
    for name in names:
        for variable in _kept.get(name) or find(name, ""):
            flat[f"{name}|{variable}"] = _kept[name][variable]
    with pathlib.Path(path).open("wb") as file:
        np.savez(file, **flat)  # type: ignore[arg-type]


def load(path: str | pathlib.Path) -> None:
    """Load the arrays that `save` wrote.

    Raises:
        LayerError: the file is damaged, not a regular one, or not such a file.
    """
    loaded: dict[str, dict[str, np.ndarray]] = {}
    try:
        with regular_files.open_binary(path) as file:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array, not several by name")
            for key in arrays.files:
                name, _, variable = key.partition("|")
                loaded.setdefault(name, {})[variable] = arrays[key]
    except _DAMAGED as error:
        raise errors.LayerError(f"{path} has no weights of Keras layers: {error}") from error
    for name, kept in loaded.items():
        if keep(kept) != name:
            raise errors.LayerError(
                f"{path}: the weights {name} have another digest. Write the file again"
            )


def forget(name: str) -> None:
    """Delete the arrays of a name, once nothing will be initialized from them."""
    _kept.pop(name, None)
