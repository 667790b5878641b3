"""What a server has published so far, read from its replay endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import zmq
import zmq.asyncio

from kvevents.codec import decode
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvevents.messages import Batch, encode_start, read_reply

_ANSWER_DEADLINE_MS = 30_000


async def last_published(port: int) -> int:
    """The number of the last batch; -1 if there is none.

    vLLM replies between two batches: everything queued before the request is sent before the reply.
    """
    last = -1
    async for batch in _batches(port):
        last = batch.seq
    return last


async def census(port: int) -> Counter[str]:
    """Blocks stored and removed, by group, since the server started or as far back as it
    remembers."""
    counts: Counter[str] = Counter()
    async for batch in _batches(port):
        for event in decode(batch.payload).events:
            _count(event, counts)
    return counts


def _count(event: Any, counts: Counter[str]) -> None:
    if isinstance(event, BlockStored):
        counts[f"group {event.group_idx} stored"] += len(event.block_hashes)
    elif isinstance(event, BlockRemoved):
        counts[f"group {event.group_idx} removed"] += len(event.block_hashes)
    elif isinstance(event, AllBlocksCleared):
        counts["cleared"] += 1


async def _batches(port: int) -> AsyncIterator[Batch]:
    """All batches that the server keeps."""
    context: zmq.asyncio.Context = zmq.asyncio.Context.instance()
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = _ANSWER_DEADLINE_MS
        socket.rcvhwm = 0
        socket.connect(f"tcp://127.0.0.1:{port}")
        await socket.send_multipart([b"", encode_start(0)])
        while (batch := read_reply(await socket.recv_multipart(), None)) is not None:
            yield batch
