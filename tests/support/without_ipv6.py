"""A kernel without IPv6 (`ipv6.disable=1`), for one thread: it refuses sockets of that family."""

from __future__ import annotations

import ctypes
import errno
import platform
import socket

import pytest

_SOCKET_CALLS = {"x86_64": 41, "aarch64": 198}
_NO_NEW_PRIVILEGES, _SECCOMP, _BY_FILTER = 38, 22, 2
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _FIRST_ARGUMENT_AT = 0, 16
_ALLOW, _FAIL_WITH = 0x7FFF0000, 0x00050000


class _Step(ctypes.Structure):
    """`struct sock_filter` of linux/filter.h."""

    _fields_ = (
        *(("code", ctypes.c_uint16), ("if_true", ctypes.c_uint8)),
        *(("if_false", ctypes.c_uint8), ("value", ctypes.c_uint32)),
    )


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_uint16), ("steps", ctypes.POINTER(_Step)))


def refuse_ipv6() -> None:
    """From now on this thread, and those that it begins, get no socket of IPv6; for good."""
    number = _SOCKET_CALLS.get(platform.machine())
    if number is None:
        pytest.skip("the number of `socket` on this machine is not known here")
    steps = (
        _Step(_LOAD, 0, 0, _NUMBER_AT),
        _Step(_IF_EQUAL, 0, 3, number),
        _Step(_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        _Step(_IF_EQUAL, 0, 1, socket.AF_INET6),
        _Step(_RETURN, 0, 0, _FAIL_WITH | errno.EAFNOSUPPORT),
        _Step(_RETURN, 0, 0, _ALLOW),
    )
    program = _Program(len(steps), (_Step * len(steps))(*steps))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(
        _SECCOMP, _BY_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "system calls cannot be refused")
