"""Ends connections with RST, as a dying host or an impatient kernel does, not with FIN."""

from __future__ import annotations

import asyncio
import socket
import struct
from asyncio.trsock import TransportSocket


def close_by_reset(end: socket.socket) -> None:
    """Close it at once; what is not sent yet is lost."""
    _reset_on_close(end)
    end.close()


def abort_by_reset(writer: asyncio.StreamWriter) -> None:
    """Do the same with one of asyncio's."""
    _reset_on_close(writer.get_extra_info("socket"))
    writer.transport.abort()


def _reset_on_close(end: socket.socket | TransportSocket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
