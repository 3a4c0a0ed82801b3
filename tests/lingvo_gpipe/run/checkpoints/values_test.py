"""Values of a checkpoint by path, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.run import checkpoints


def test_trained_values_are_averages_where_the_run_keeps_them(tmp_path: Path) -> None:
    saved: dict[str, np.ndarray[Any, Any]] = {
        "variables/dense/kernel": np.ones([2, 3], np.float32),
        "average/dense/kernel": np.full([2, 3], 0.5, np.float32),
        "variables/norm/moving_mean": np.zeros(3, np.float32),
        "slots/dense/kernel/velocity": np.ones([2, 3], np.float32),
        "step": np.array(4, np.int64),
    }
    prefix = checkpoints.write_values(str(tmp_path), 4, saved, "class: x\n")
    for place in (prefix, str(tmp_path)):
        found = checkpoints.trained_values(place)
        assert sorted(found) == ["dense/kernel", "norm/moving_mean"]
        np.testing.assert_array_equal(found["dense/kernel"], np.full([2, 3], 0.5))


def test_trained_values_of_a_damaged_checkpoint_are_refused(tmp_path: Path) -> None:
    saved = {"variables/dense/kernel": np.ones([2, 3], np.float32)}
    prefix = checkpoints.write_values(str(tmp_path), 4, saved, "class: x\n")
    Path(f"{prefix}.index").write_bytes(b"nothing")
    with pytest.raises(errors.CheckpointError, match="is torn and cannot be read"):
        checkpoints.trained_values(prefix)
    with pytest.raises(errors.CheckpointError, match="there is no checkpoint"):
        checkpoints.trained_values(str(tmp_path / "ckpt-7"))
