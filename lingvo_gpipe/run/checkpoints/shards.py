"""Writing a checkpoint whose values are in several processes: each writes its own, all at once.

`tf.train.Checkpoint` would trace a function of all variables for each checkpoint, and send it to
the workers: 4.3 s of the chief's processor time for 1,124 variables. Here it is traced once.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.checkpoint import graph_view, save_util

from lingvo_gpipe import packing
from lingvo_gpipe.execution import outer_function
from lingvo_gpipe.run.checkpoints import keys

_Stored = packing.Stored[str]


class OverHosts:
    """What a `tf.train.CheckpointManager` saves in the place of a `tf.train.Checkpoint`.

    The files have the same keys, values and object graph.

    Attributes:
        stored: the values to write.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint) -> None:
        """Write nothing yet.

        Args:
            checkpoint: has the object of each key.
        """
        self.stored: Sequence[_Stored] = ()
        self._checkpoint = checkpoint
        self._graph: tf.Tensor | None = None
        self._save = outer_function.OuterFunction(self._written)

    @property
    def save_counter(self) -> tf.Variable:
        """Number of checkpoints so far; the manager adds one before each."""
        return self._checkpoint.save_counter

    def _write(self, file_prefix: str, options: tf.train.CheckpointOptions) -> str:
        """Write the files, then do as the options say; the manager calls it.

        Raises:
            tf.errors.OpError: they cannot be written.
        """
        counter = self.save_counter
        if self._graph is None:
            *_, graph = save_util.serialize_graph_view(graph_view.ObjectGraphView(self._checkpoint))
            with tf.device(counter.device):
                self._graph = tf.constant(graph.SerializeToString())
        tensors = [stored.tensor for stored in self.stored]
        self._save(tf.constant(file_prefix), self._graph, counter.read_value(), tensors).numpy()
        for callback in options.experimental_write_callbacks:
            callback(file_prefix)
        return file_prefix

    def _written(
        self, prefix: tf.Tensor, graph: tf.Tensor, counter: tf.Tensor, tensors: list[tf.Tensor]
    ) -> tf.Tensor:
        """Write one file for each host's device, then join their indices; in-graph.

        Returns:
            A scalar that is there once all is written.
        """
        here = self.save_counter.device
        by_host: dict[str, list[tuple[str, tf.Tensor]]] = {
            here: [(keys.OBJECT_GRAPH, graph), (keys.in_file(keys.COUNTER), counter)]
        }
        for stored, tensor in zip(self.stored, tensors, strict=True):
            with tf.device(stored.tensor.device):
                values = stored.values(tensor)
            names = map(keys.in_file, stored.keys)
            by_host.setdefault(stored.tensor.device, []).extend(zip(names, values, strict=True))
        shards, saved = [], []
        for number, (host, values_of_host) in enumerate(by_host.items()):
            with tf.device(here):
                part = f"_temp/part-{number:05d}-of-{len(by_host):05d}"
                shards.append(tf.strings.join([prefix, part]))
            names_of_host, held = zip(*values_of_host, strict=True)
            with tf.device(host):
                saved.append(
                    tf.raw_ops.SaveV2(
                        prefix=shards[-1],
                        tensor_names=list(names_of_host),
                        shape_and_slices=[""] * len(held),
                        tensors=list(held),
                    )
                )
        with tf.device(here), tf.control_dependencies(saved):
            joined = tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=shards, destination_prefix=prefix, delete_old_dirs=True
            )
            with tf.control_dependencies([joined]):
                return tf.zeros([])
