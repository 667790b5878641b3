"""A publisher that connects out, as llm-d's and KServe's engines do."""

from __future__ import annotations

from typing import Any

import zmq

from tests.support.vllm_publisher import seq_frame
from tests.support.waiting import eventually


class Pod:
    """An engine's publisher: it connects out. An XPUB, which shows that it is subscribed to."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, topic: str) -> None:
        self.topic = topic.encode()
        self.socket = context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.connect(endpoint)
        self.seq = -1

    async def subscribed(self) -> Pod:
        await eventually(lambda: self.socket.poll(0) > 0, "the subscription")
        self.socket.recv()
        return self

    def publish(self, payload: bytes | None = None, skip: int = 0) -> None:
        self.seq += 1 + skip
        if payload is None:  # no two processes publish the same: batches say when they were made
            payload = b"%d at %d" % (self.seq, id(self))
        self.socket.send_multipart([self.topic, seq_frame(self.seq), payload])
