"""The scripts of docs/image_models.md write two sets in the layout of `ImageFolder`."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.tasks.image import ImageFolder

DOCUMENT = Path(__file__).parents[3] / "docs" / "image_models.md"


def lay_out(name: str, source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the document's program called `name` on `source`; return the folder that it filled."""
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), flags=re.M | re.S)
    (block,) = (block for block in blocks if block.startswith(f"# {name}:"))
    program = folder / name
    program.write_text(block)
    monkeypatch.setattr("sys.argv", [name, str(source), str(folder / "out")])
    runpy.run_path(str(program))
    return folder / "out"


def jpeg(path: Path, height: int = 40) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((height, 30, 3), 128, np.uint8)
    path.write_bytes(tf.io.encode_jpeg(pixels).numpy())


def count(folder: Path) -> tuple[tuple[str, ...], int, int]:
    source = ImageFolder.Params(
        data_dir=str(folder), batch_size=2, height=8, width=8, resize=True
    ).instantiate()
    return source.class_names, source.num_examples("train"), source.num_examples("test")


def test_aircraft_is_laid_out_by_variant_without_its_banner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "fgvc"
    lists = {"trainval": {"1": "707-320", "2": "F-16A/B", "3": "707-320"}, "test": {"4": "707-320"}}
    for part, images in lists.items():
        for image in images:
            jpeg(source / "data" / "images" / f"{image}.jpg")
        lines = [f"{image} {variant}" for image, variant in images.items()]
        (source / "data" / f"images_variant_{part}.txt").write_text("\n".join(lines) + "\n")
    out = lay_out("aircraft.py", source, tmp_path, monkeypatch)
    assert count(out) == (("707-320", "F-16A_B"), 3, 1)
    content = (out / "test" / "707-320" / "4.jpg").read_bytes()
    assert tf.io.decode_jpeg(content).shape == (20, 30, 3)


def test_birdsnap_is_laid_out_by_its_list_of_test_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "birdsnap"
    for name in ("Barn_Owl/1.jpg", "Barn_Owl/2.jpg", "Mallard/3.jpg"):
        jpeg(source / "download" / "images" / name)
    (source / "test_images.txt").write_text("path\nBarn_Owl/2.jpg\nMallard/gone.jpg\n")
    out = lay_out("birdsnap.py", source, tmp_path, monkeypatch)
    assert count(out) == (("Barn_Owl", "Mallard"), 2, 1)
    assert (out / "test" / "Barn_Owl" / "2.jpg").exists()
