"""Input: what a task reads, declared in Params; subclasses say where it comes from."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.input.reading import Batches, CutOut, Reading
from lingvo_gpipe.input.serving import Program, Serving
from lingvo_gpipe.nests import Batch
from lingvo_gpipe.network.parts import ReplicaPart

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task


class Input(hyperparams.Configurable, abc.ABC):
    """Base of every input: named fields of mini-batches.

    Attributes:
        asset_names: names of the files that a run keeps; see `assets`.
    """

    asset_names: tuple[str, ...] = ()

    class Params(hyperparams.Configurable.Params):
        """Fields that every input has."""

        batch_size: int = hyperparams.required("Examples in a mini-batch of training.")
        eval_batch_size: int | None = hyperparams.field(
            None, "Examples in a mini-batch of evaluation; None: those of training."
        )
        on_worker: bool = hyperparams.field(
            False,
            "The workers with the first cells read the data, each the examples of its replica, "
            "not the chief; they need copies.",
        )

        def synthetic(self, task_params: Task.Params) -> Input.Params:
            """Return params of an input with synthetic examples in place of this one's.

            Args:
                task_params: the task, whose layers say which labels and ids they take; a number of
                    classes that is not set may be set.

            Raises:
                InputError: there are none for this input.
            """
            from lingvo_gpipe.input import synthetic

            return synthetic.SyntheticExamples.of(self, task_params)

    def __init__(self, params: Input.Params) -> None:
        super().__init__(params)
        for name in ("batch_size", "eval_batch_size"):
            size = getattr(params, name)
            if size is not None and size < 1:
                raise errors.InputError(f"input.{name}={size} is too small. Use 1 or more")

    @abc.abstractmethod
    def element_spec(self, training: bool = True) -> dict[str, tf.TensorSpec]:
        """Return the fields of one mini-batch, from params alone; evaluation's last may be less."""

    @abc.abstractmethod
    def batches(self, seed: int, position: int = 0) -> Batches:
        """Return the endless mini-batches of training from number `position` on."""

    @abc.abstractmethod
    def evaluation(self, split: str, batch_size: int | None = None) -> Batches:
        """Return mini-batches with every example of `split` once; the last may be smaller."""

    def part(self, part: ReplicaPart, seed: int, position: int = 0) -> Reading:
        """Return a part of each mini-batch of `batches`: here, whole ones are read and cut."""
        return CutOut(self.batches(seed, position), part)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of their labels; empty: not known."""
        return ()

    @property
    def where(self) -> str:
        """Name of the data in messages."""
        return type(self).__name__

    def complete(self, task_params: Task.Params) -> None:
        """Set the fields of a task that only the data determines: here, the number of classes.

        Raises:
            InputError: a field is set already and does not fit the data.
        """
        count, model = len(self.class_names), task_params.model
        for path, value, declared in list(model.iter_paths()) if count else ():
            if declared.name != "classes":
                continue
            if value is None or value is hyperparams.REQUIRED:
                model.set_path(path, count)
            elif value != count:
                way_out = f"Try --params_override='model.{path}={count}', or use other data"
                if value == count + 1 and getattr(self.params, "label_offset", 1) == 0:
                    way_out = "Set input.label_offset=1 where class 0 is the background"
                raise errors.InputError(
                    f"{self.where} has {count} classes, but model.{path}={value}. {way_out}"
                )

    def assets(self) -> Mapping[str, bytes]:
        """Return the files that define the model's ids: `asset_names` → content.

        They are kept in the run's folder, where different files of these names are refused, and
        exported with the model.
        """
        return {}

    def fingerprint(self, split: str | None = None) -> dict[str, str]:
        """Return what all copies of the data have in common: short texts by what they describe.

        Where a worker reads the data, a copy that differs from the chief's is refused.

        Args:
            split: part of the data that is read; None: that of training.
        """
        del split
        return {
            name: f"sha256 {hashlib.sha256(content).hexdigest()[:16]}"
            for name, content in self.assets().items()
        }

    def recall(self, assets: Mapping[str, bytes]) -> None:
        """Use what a run keeps in place of the data, which may be gone: serving needs no more.

        Args:
            assets: all of them, as `assets` returned them when the run began.
        """
        del assets

    def serving(self) -> Serving | Program:
        """Return how an exported model is called.

        Raises:
            InputError: this input cannot be served.
        """
        raise errors.InputError(
            f"a model on {type(self).__name__} cannot be exported: that input defines no serving. "
            "Add the method `serving` to its class"
        )

    def pictures(self, batch: Batch) -> dict[str, tf.Tensor]:
        """Return samples of a mini-batch as used in training: name → uint8 [n, H, W, C]."""
        del batch
        return {}


def check_split(where: str, split: str, splits: Collection[str]) -> None:
    """Refuse a split that does not exist.

    Raises:
        InputError: names those that do, and the fields that choose one.
    """
    if split not in splits:
        raise errors.InputError(
            f"{where} has no split {split!r}; there are {', '.join(sorted(splits)) or 'none'}. Add "
            "it to the data, or name another by --params_override=eval.split=NAME, or "
            "input.train_split=NAME for training"
        )
