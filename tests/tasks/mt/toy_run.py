"""A translation run of a few updates on made text, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lingvo_gpipe import optimizer, pipelining, task
from lingvo_gpipe.tasks.mt import decoding, search, transformer
from lingvo_gpipe.tasks.mt import input as mt_input
from lingvo_gpipe.tasks.mt import task as mt_task
from tests.tasks.mt import toy_text


def prepared(folder: Path, **fields: Any) -> Path:
    """Return the folder of records of two pairs, de:en and sw:en; more by fields of Preparation."""
    text = toy_text.write_folder(folder / "text", {"de": 90, "sw": 20}, held_out=4)
    toy_text.params(text, **fields).instantiate().run(folder / "records")
    return folder / "records"


def task_of(data: Path, **model: Any) -> Any:
    """Return a task of three updates on such records; `model` are fields of its network."""
    layers = transformer.translation_transformer(1, 8, 1, 64_000, units=8, head_dim=4, dropout=0.0)
    return mt_task.TranslationTask.Params(
        model=pipelining.PipeliningLayer.Params(layers=layers, **model),
        input=mt_input.Translation.Params(
            data_dir=str(data), batch_size=160, max_length=80, num_shapes=1, temperature=1.0
        ),
        train=task.Train(
            optimizer=optimizer.Optimizer.Params(name="SGD", learning_rate=0.1),
            max_steps=3,
            log_interval_steps=1,
        ),
        decode=decoding.Decode(search=search.Search(beam=3, max_length=12)),
    )
