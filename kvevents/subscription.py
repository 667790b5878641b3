"""One connection to a publisher, on an asyncio loop."""

from __future__ import annotations

import zmq

from kvevents.endpoints import Context
from kvevents.messages import Batch, read_live
from kvevents.sockets import SocketConnection, SocketLimits


class Subscription(SocketConnection):
    """Batches from one publisher, of one process: it connects once and never again.

    Args:
        endpoint: `tcp://host:port`, `ipc://path` or `inproc://name`.
    """

    def __init__(self, context: Context, endpoint: str, topic: bytes, limits: SocketLimits) -> None:
        super().__init__(context, zmq.SUB, endpoint, limits, topic)

    def next_batch(self, topic: bytes | None) -> Batch | None:
        """Return the next batch, None if none has come.

        Args:
            topic: The only topic that counts; None: every one.

        Raises:
            MalformedBatch: A message that is not a batch.
        """
        frames = self.receive_three()
        return None if frames is None else read_live(frames, topic)
