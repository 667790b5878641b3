"""The configuration of a publisher."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvevents.curve import CurveServer
from kvevents.endpoints import ZmqEndpoint
from kvevents.sealing import HashKey


@dataclass(frozen=True, slots=True)
class ReplyLimits:
    """Limits on clients of the replay endpoint; requests over a limit wait in their sockets."""

    concurrent: int = 8
    """Replies in progress at once."""
    requests_per_s: int = 100
    """Requests read per second, good or bad."""
    queued_messages: int = 256
    """Messages that wait for one client to read them."""
    stall_s: float = 5.0
    """A client that has read nothing for this time loses the rest of its reply."""

    def __post_init__(self) -> None:
        for name in ("concurrent", "requests_per_s", "queued_messages"):
            _check_count(f"reply_limits.{name}", getattr(self, name))
        _check_seconds("reply_limits.stall_s", self.stall_s)


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    """The publishing of one engine. Events carry prompts, so the default addresses are loopback;
    any other has to be configured.

    Raises:
        EndpointError: An address is malformed.
        ValueError: A number is out of range.
    """

    endpoint: str = "tcp://127.0.0.1:5557"
    """Bound if it is an address of this machine, else connected to."""
    replay_endpoint: str | None = None
    """Always bound. None: no replays and no snapshots."""
    topic: str = ""
    kind: str = "zmq"
    """The publisher to build: `zmq`, `null`, a registered one, or a plug-in of the entry-point
    group `kvroute.publishers`."""
    buffer_steps: int = 10_000
    """Most batches kept for replay."""
    buffer_bytes: int = 256 * 2**20
    """Most bytes kept for replay; the tighter of both bounds counts."""
    hwm: int = 100_000
    """Most batches that wait for one subscriber; ZMQ drops further ones."""
    max_queue_size: int = 10_000
    """Most batches that wait for the publisher's thread; `publish` drops further ones."""
    heartbeat_s: float = 1.0
    """Silence after which an empty batch makes a loss at the tail visible."""
    reply_limits: ReplyLimits = field(default_factory=ReplyLimits)
    with_block_size: bool = False
    """Stored events carry `block_size` and every other field, for readers that require them. They
    must still pass over a batch with a `CacheLayout`, an event of ours only."""
    curve: CurveServer | None = None
    """Encrypts both addresses, for subscribers with a key; None: plain text."""
    include_token_ids: bool = True
    """False: events carry nothing of prompts, and announce blocks under *hash_key*. Needs an engine
    that hashes blocks with SHA-256."""
    hash_key: HashKey | None = None
    """The key shared with the consumers."""
    retention_hints: int = 0
    """Version of the retention hints that the engine takes with a request; announced."""

    def __post_init__(self) -> None:
        ZmqEndpoint.parse("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            ZmqEndpoint.parse("replay_endpoint", self.replay_endpoint)
        for name in ("buffer_steps", "buffer_bytes", "hwm", "max_queue_size"):
            _check_count(name, getattr(self, name))
        _check_seconds("heartbeat_s", self.heartbeat_s)
        if not 0 <= self.retention_hints < 2**31:
            raise ValueError(f"retention_hints: {self.retention_hints} must lie in [0, 2**31)")
        if self.include_token_ids != (self.hash_key is None):
            given = "a key is given" if self.hash_key is not None else "no key is given"
            raise ValueError(f"include_token_ids: False goes with a hash_key, and {given}")

    @property
    def uses_inproc(self) -> bool:
        """Return whether an address is known only inside one ZMQ context."""
        return any(
            address and address.startswith("inproc:")
            for address in (self.endpoint, self.replay_endpoint)
        )


def _check_count(name: str, value: int) -> None:
    if not 1 <= value < 2**31:
        raise ValueError(f"{name}: {value} must lie in [1, 2**31)")


def _check_seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 < value <= 86_400):
        raise ValueError(f"{name}: {value} must be more than 0 and at most 86400 seconds")
