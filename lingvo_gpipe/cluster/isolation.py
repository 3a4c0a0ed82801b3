"""A network of their own for the processes of one machine, so that no other can reach their ports.

TensorFlow's port listens on every interface, without authentication. In a network namespace of
Linux there is one interface, the loopback of that namespace.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1


class PrivateNetwork:
    """A network namespace; it ends with the last process in it, once this object is closed.

    It is made by a forked process, which ends as soon as its files are open here.
    """

    def __init__(self) -> None:
        """Make it.

        Raises:
            OSError: the system does not allow it.
        """
        self._user: int | None = None
        is_root = os.geteuid() == 0
        ids = os.geteuid(), os.getegid()
        ready_reads, ready_writes = os.pipe()
        hold_reads, hold_writes = os.pipe()
        maker = os.fork()
        if maker == 0:
            os.close(hold_writes)
            os.close(ready_reads)
            _hold(is_root, ids, ready_writes, hold_reads)
        os.close(ready_writes)
        os.close(hold_reads)
        with os.fdopen(ready_reads, "rb") as ready:
            answer = ready.read()
        try:
            if answer != b"ready":
                number = int(answer or b"1")
                raise OSError(number, os.strerror(number))
            if not is_root:
                self._user = os.open(f"/proc/{maker}/ns/user", os.O_RDONLY)
            self._network = os.open(f"/proc/{maker}/ns/net", os.O_RDONLY)
        finally:
            os.close(hold_writes)  # the open files keep the namespaces
            os.waitpid(maker, 0)

    def enter(self) -> None:
        """Move this process, which must have one thread, into the namespace.

        Raises:
            OSError: the system does not allow it.
        """
        if self._user is not None:
            _call("setns", self._user, _CLONE_NEWUSER)
        _call("setns", self._network, _CLONE_NEWNET)

    def close(self) -> None:
        """Leave the namespace to the processes in it."""
        for descriptor in (self._user, self._network):
            if descriptor is not None:
                os.close(descriptor)


def _hold(is_root: bool, ids: tuple[int, int], ready: int, hold: int) -> None:
    """Make the namespaces in a forked process, say so, and wait; never returns."""
    try:
        _call("unshare", _CLONE_NEWNET if is_root else _CLONE_NEWUSER | _CLONE_NEWNET)
        if not is_root:
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{ids[0]} {ids[0]} 1"),
                ("gid_map", f"{ids[1]} {ids[1]} 1"),
            ):
                with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                    file.write(text)
        _raise_loopback()
        os.write(ready, b"ready")
    except OSError as error:
        os.write(ready, str(error.errno or 1).encode())
    os.close(ready)
    os.read(hold, 1)
    os._exit(0)


def _raise_loopback() -> None:
    """Switch on the interface `lo`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
