"""Variables packed into few: parts of one variable on a device, each used like a variable.

A call to another process names every variable that the function uses, which costs the calling
process 0.1 ms for each. So variables on workers are parts of a few *packs*. A part has the shape,
dtype, device and value of a variable, and is saved and restored under its own key: whether
variables are packed changes no result and no checkpoint.

A pack holds variables of one device, dtype and kind, of at most `MAX_BYTES` together. It is
assigned as a whole: an update needs memory for the new values of one pack and of its slots at once.
Each part begins at a multiple of `_ROW_BYTES`, so that reading it copies nothing.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors

MAX_BYTES = 32 * 2**20
"""A pack of more would need much memory to be assigned, and save little time."""
_ROW_BYTES = 64  # TensorFlow's alignment: a tensor at a multiple of it may share its buffer
_Key = TypeVar("_Key", bound=Hashable)


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """A variable to create.

    Attributes:
        shape: static.
        dtype: dtype of the variable.
        device: name of its device.
        kind: only variables of equal kinds share a pack.
        value: returns the initial value; called on the device.
        trainable: whether a tape watches it, if it is not packed.
        name: name of the variable, if it is not packed.
    """

    shape: tuple[int, ...]
    dtype: tf.DType
    device: str
    kind: Hashable
    value: Callable[[], tf.Tensor]
    trainable: bool = False
    name: str | None = None

    @property
    def rows(self) -> int:
        """Rows of `_ROW_BYTES` that it takes in a pack."""
        return -(-math.prod(self.shape) * self.dtype.size // _ROW_BYTES)


class PackedVariable:
    """A part of a pack, used like a variable.

    Attributes:
        pack: the pack.
        index: number of the part in its pack.
        shape: a `tf.TensorShape`, as of a variable.
        dtype: dtype of the variable.
    """

    def __init__(self, pack: _Pack, index: int, shape: tuple[int, ...]) -> None:
        self.pack = pack
        self.index = index
        self.shape = tf.TensorShape(shape)
        self.dtype = pack.variable.dtype

    @property
    def device(self) -> str:
        """Name of its device."""
        name: str = self.pack.variable.device
        return name

    def read_value(self) -> tf.Tensor:
        """Return its value, on its device."""
        pack = self.pack
        begin = sum(pack.rows[: self.index])
        with tf.device(self.device):
            rows = pack.variable.value()[begin : begin + pack.rows[self.index]]
            return _from_rows(rows, self.shape)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return its value as an array."""
        value: np.ndarray[Any, Any] = self.read_value().numpy()
        return value

    def assign(self, value: Any) -> None:
        """Assign a value of its shape; `packing.assign` assigns several at once."""
        with tf.device(self.device):
            assign([(self, tf.convert_to_tensor(value, self.dtype))])

    @property
    def _should_act_as_resource_variable(self) -> bool:
        """Refuse to be a source of a `tf.GradientTape`, which asks this of its sources.

        Raises:
            DeviceError: always.
        """
        raise errors.DeviceError(
            "on workers, weights are packed, so a tape has no gradients of pipe.weights. Use "
            "pipe.value_and_gradients; or watch theta = pipe.theta(), call pipe.fprop(theta, …) "
            "and ask for the gradients of theta"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.numpy(), dtype)


Variable: TypeAlias = "tf.Variable | PackedVariable"
"""What a network's variables are: with shape, dtype, device, read_value(), numpy(), assign()."""


def _to_tensor(part: PackedVariable, dtype: tf.DType | None = None, **_: Any) -> tf.Tensor:
    return tf.convert_to_tensor(part.read_value(), dtype)


tf.register_tensor_conversion_function(PackedVariable, _to_tensor)


class _Pack:
    """Variables in one.

    Attributes:
        variable: [rows, elements of a row].
        parts: the parts in order.
        rows: how many rows each has.
    """

    def __init__(self, variable: tf.Variable, wanted: Sequence[Wanted]) -> None:
        self.variable = variable
        self.parts = [PackedVariable(self, index, each.shape) for index, each in enumerate(wanted)]
        self.rows = [each.rows for each in wanted]

    def split(self, whole: tf.Tensor) -> list[tf.Tensor]:
        """Return the values of all parts, of the value of the variable."""
        pieces = zip(tf.split(whole, self.rows), self.parts, strict=True)
        return [_from_rows(rows, part.shape) for rows, part in pieces]

    def read(self) -> list[tf.Tensor]:
        """Return the values of all parts, on their device."""
        with tf.device(self.variable.device):
            return self.split(self.variable.value())

    def assign(self, values: Mapping[int, tf.Tensor]) -> tf.Operation | None:
        """Assign parts by number; the others keep their values."""
        with tf.device(self.variable.device):
            old = self.read() if len(values) < len(self.parts) else []
            new = [values[i] if i in values else old[i] for i in range(len(self.parts))]
            for part, value in zip(self.parts, new, strict=True):
                part.shape.assert_is_compatible_with(value.shape)
            return self.variable.assign(_to_rows(new), read_value=False)


def create(wanted: Mapping[_Key, Wanted]) -> dict[_Key, Variable]:
    """Create variables, those on workers as parts of packs; a pack of one is a variable."""
    created: dict[_Key, Variable] = {}
    for keys in packs(wanted):
        of_pack = [wanted[key] for key in keys]
        first = of_pack[0]
        with tf.init_scope(), tf.device(first.device):
            values = [tf.convert_to_tensor(each.value(), first.dtype) for each in of_pack]
            if len(keys) == 1:
                created[keys[0]] = tf.Variable(values[0], first.trainable, name=first.name)
                continue
            # Not trained, since a tape would add the gradients of all parts in the process that
            # calls; it watches what `read` returns.
            pack = _Pack(tf.Variable(_to_rows(values), trainable=False), of_pack)
        created |= dict(zip(keys, pack.parts, strict=True))
    _wait(each.device for each in wanted.values())
    return {key: created[key] for key in wanted}


def copies(variables: Mapping[_Key, Variable]) -> dict[_Key, Variable]:
    """Return variables of equal values that are not trained, packed alike."""
    return create(
        {
            key: Wanted(tuple(v.shape), v.dtype, v.device, unit(v), v.read_value)
            for key, v in variables.items()
        }
    )


def exchange(variables: Mapping[_Key, Variable], others: Mapping[_Key, Variable]) -> None:
    """Exchange the values of variables and of those at the same keys of their `copies`.

    In a graph: on workers, a function that is called next would not wait for eager assignments.
    """
    values, other_values = read(variables), read({key: others[key] for key in variables})
    assign((variable, other_values[key]) for key, variable in variables.items())
    assign((others[key], value) for key, value in values.items())


def read(variables: Mapping[_Key, Variable]) -> dict[_Key, tf.Tensor]:
    """Return the values of variables, each on its device; a pack is read once."""
    of_packs: dict[_Pack, list[tf.Tensor]] = {}
    values: dict[_Key, tf.Tensor] = {}
    for key, variable in variables.items():
        if isinstance(variable, PackedVariable):
            if variable.pack not in of_packs:
                of_packs[variable.pack] = variable.pack.read()
            values[key] = of_packs[variable.pack][variable.index]
        else:
            with tf.device(variable.device):
                values[key] = tf.convert_to_tensor(variable)
    return values


def assign(pairs: Iterable[tuple[Variable, tf.Tensor]]) -> list[tf.Operation]:
    """Assign values, a pack once; return the operations that do so, none eagerly."""
    of_packs: dict[_Pack, dict[int, tf.Tensor]] = {}
    operations = []
    devices = set()
    for variable, value in pairs:
        devices.add(variable.device)
        if isinstance(variable, PackedVariable):
            of_packs.setdefault(variable.pack, {})[variable.index] = value
        else:
            with tf.device(variable.device):
                operations.append(variable.assign(value, read_value=False))
    operations += [pack.assign(values) for pack, values in of_packs.items()]
    _wait(devices)
    return [] if tf.executing_eagerly() else operations


@dataclasses.dataclass(frozen=True, slots=True)
class Stored(Generic[_Key]):
    """The values of a pack's parts, or of one variable, at some moment.

    Attributes:
        tensor: all of them, on the host of their device.
        variables: key → variable whose value it is; of one pack, or a single one.
    """

    tensor: tf.Tensor
    variables: Mapping[_Key, Variable]

    @property
    def keys(self) -> tuple[_Key, ...]:
        """Keys of the values, in order."""
        return tuple(self.variables)

    def values(self, tensor: tf.Tensor | None = None) -> list[tf.Tensor]:
        """Return the values in the order of `keys`, on the present device.

        Args:
            tensor: what stands for `tensor`, such as the argument of a function; None: itself.
        """
        whole = self.tensor if tensor is None else tensor
        parts = [v for v in self.variables.values() if isinstance(v, PackedVariable)]
        if not parts:
            return [whole]
        values = parts[0].pack.split(whole)
        return [values[part.index] for part in parts]


def snapshot(variables: Mapping[_Key, Variable]) -> list[Stored[_Key]]:
    """Return the values which variables have now, whatever follows.

    Only values on accelerators are copied, to the host of their device: what is read from a CPU
    stays as it is while someone holds it, and the next update makes a new tensor.
    """
    units: dict[Hashable, dict[_Key, Variable]] = {}
    for key, variable in variables.items():
        units.setdefault(unit(variable), {})[key] = variable
    stored = []
    for of_unit in units.values():
        first = next(iter(of_unit.values()))
        variable = first.pack.variable if isinstance(first, PackedVariable) else first
        with tf.device(host(variable.device)):
            stored.append(Stored(tf.identity(variable.read_value()), of_unit))
    _wait(variable.device for variable in variables.values())
    return stored


def host(device: str) -> str:
    """Return the CPU of a device's process; a CPU is its own.

    >>> host("/job:worker/task:1/device:GPU:3")
    '/job:worker/task:1/device:CPU:0'
    """
    return re.sub(r"device:(?!CPU:)\w+:\d+$", "device:CPU:0", device)


def unit(variable: Variable) -> Hashable:
    """Return what is equal for the variables that one operation assigns: those of a pack."""
    return variable.pack if isinstance(variable, PackedVariable) else variable.ref()


def is_packed(device: str) -> bool:
    """Return whether variables on a device are packed: those of another process.

    >>> is_packed("/job:worker/replica:0/task:1/device:CPU:0"), is_packed("/device:CPU:1")
    (True, False)
    """
    return "/job:worker" in device


def _wait(devices: Iterable[str]) -> None:
    """Wait until eager reads and assignments in other processes are done; in a graph, do nothing.

    A function that is called next would not wait for them. Eager operations do.
    """
    for device in set(devices) if tf.executing_eagerly() else ():
        if is_packed(device):
            with tf.device(device):
                tf.zeros([]).numpy()


def packs(wanted: Mapping[_Key, Wanted]) -> list[list[_Key]]:
    """Return the keys of each pack, and of each variable that is not packed."""
    groups: list[list[_Key]] = []
    open_groups: dict[Hashable, tuple[list[_Key], int]] = {}  # with bytes so far
    for key, each in wanted.items():
        kind = (each.device, each.dtype, each.kind, each.trainable)
        size = each.rows * _ROW_BYTES
        group, filled = open_groups.get(kind, ([], MAX_BYTES + 1))
        if not is_packed(each.device) or filled + size > MAX_BYTES:
            group, filled = [], 0
            groups.append(group)
        group.append(key)
        open_groups[kind] = group, filled + size
    return groups


def _to_rows(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return values as rows of `_ROW_BYTES`, those of each padded with zeros."""
    rows = []
    for value in values:
        lanes = _ROW_BYTES // value.dtype.size
        flat = tf.reshape(value, [-1])
        if missing := -math.prod(value.shape) % lanes:
            flat = tf.pad(flat, [[0, missing]])
        rows.append(tf.reshape(flat, [-1, lanes]))
    return tf.concat(rows, 0)


def _from_rows(rows: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    count = math.prod(shape)
    if rows.shape.num_elements() == count:
        return tf.reshape(rows, shape)
    return tf.reshape(tf.reshape(rows, [-1])[:count], shape)
