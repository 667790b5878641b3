"""Do routers that start late get every batch of a long ring, from vLLM's own publisher?

    .venv-interop/bin/python -m benchmarks.late_routers --batches 2500 --tokens 8192 --routers 10

vLLM before 0.33 drops from a replay what a router does not take as fast as it is sent; --replay-hwm
stages that with a later one. Each router decodes every batch, and all share one processor, as on a
machine that has just started. One JSON line a router; the exit status is 1 unless all are live and
whole. It needs vLLM: `make interop` sets up the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvevents.codec import decode
from kvevents.delivery import Effect
from kvevents.errors import KVEventsError
from kvevents.events import BlockStored
from kvevents.messages import Batch
from kvevents.stream_state import SourceState
from kvevents.subscriber import Subscriber

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Ring:
    """The batches that the publisher holds before the first router comes."""

    batches: int
    tokens: int
    """The tokens of each batch: one request's prompt."""
    replay_hwm: int | None = None
    """Replies that may wait for a router; None: as vLLM sets it."""

    @property
    def blocks(self) -> int:
        return self.batches * (self.tokens // BLOCK_TOKENS)


@dataclass(frozen=True)
class Outcome:
    """The progress of one router."""

    state: str
    blocks: int
    expected_blocks: int
    replays: int
    seconds: float

    @property
    def is_whole(self) -> bool:
        return self.state == SourceState.LIVE.value and self.blocks == self.expected_blocks


class _Router:
    """Counts the blocks of a source."""

    def __init__(self, expected_blocks: int) -> None:
        self.blocks = 0
        self._expected = expected_blocks
        self._began = time.monotonic()
        self.subscriber: Subscriber | None = None

    def apply(self, batch: Batch) -> Effect:
        events = decode(batch.payload).events
        self.blocks += sum(len(e.block_hashes) for e in events if isinstance(e, BlockStored))
        return Effect.KEPT

    def clear(self, reason: str) -> None:
        del reason
        self.blocks = 0

    def change(self, state: SourceState) -> None:
        pass

    def report(self, problem: KVEventsError) -> None:
        print(problem, file=sys.stderr)

    async def follow(self, endpoint: str, replay_endpoint: str, limit_s: float) -> Outcome:
        subscriber = Subscriber(endpoint, self, replay_endpoint=replay_endpoint)
        task = asyncio.get_running_loop().create_task(subscriber.run())
        deadline = self._began + limit_s
        while time.monotonic() < deadline and not task.done():
            await asyncio.sleep(0.05)
            if subscriber.statistics().state is SourceState.LIVE:
                break
        seen = subscriber.statistics()
        task.cancel()
        await asyncio.wait([task])
        seconds = round(time.monotonic() - self._began, 2)
        return Outcome(seen.state.value, self.blocks, self._expected, seen.replays, seconds)


async def follow_late(ring: Ring, routers: int, limit_s: float = 120.0) -> list[Outcome]:
    """Fill a ring, start all *routers* at once, and see how far they come in *limit_s*."""
    with _publisher(ring) as (endpoint, replay_endpoint):
        made = [_Router(ring.blocks) for _ in range(routers)]
        return list(
            await asyncio.gather(
                *(each.follow(endpoint, replay_endpoint, limit_s) for each in made)
            )
        )


@contextmanager
def _publisher(ring: Ring) -> Iterator[tuple[str, str]]:
    """Yield the addresses of a publisher in a process of its own, with a full ring."""
    spawning = multiprocessing.get_context("spawn")
    ports = _free_port(), _free_port()
    is_full = spawning.Event()
    process = spawning.Process(target=_publish, args=(ring, *ports, is_full), daemon=True)
    process.start()
    try:
        if not is_full.wait(300):
            raise RuntimeError("the publisher did not fill its ring in 300 s")
        yield f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}"
    finally:
        process.kill()
        process.join()


def _publish(ring: Ring, port: int, replay_port: int, is_full: Any) -> None:
    from vllm.distributed import kv_events as vllm_events  # noqa: PLC0415 (only this process)

    class Publisher(vllm_events.ZmqEventPublisher):  # type: ignore[misc, unused-ignore]
        def _socket_setup(self) -> None:
            if ring.replay_hwm is not None:
                self._replay_hwm = ring.replay_hwm
            super()._socket_setup()

    # With a star it binds; with a name or a number it would connect.
    publisher = Publisher(0, f"tcp://*:{port}", f"tcp://*:{replay_port}")
    blocks = ring.tokens // BLOCK_TOKENS
    for number in range(ring.batches):
        first = number * blocks
        stored = vllm_events.BlockStored(
            block_hashes=list(range(first + 1, first + blocks + 1)),
            parent_block_hash=None,
            token_ids=list(range(ring.tokens)),
            block_size=BLOCK_TOKENS,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )
        publisher.publish(vllm_events.KVEventBatch(ts=time.time(), events=[stored]))
    publisher._event_queue.join()
    is_full.set()
    time.sleep(3600)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=320, help="of each batch")
    parser.add_argument("--routers", type=int, default=10)
    parser.add_argument("--replay-hwm", type=int, help="1000 as before vLLM 0.33")
    options = parser.parse_args()
    ring = Ring(options.batches, options.tokens, options.replay_hwm)
    outcomes = asyncio.run(follow_late(ring, options.routers))
    for outcome in outcomes:
        print(json.dumps({"benchmark": "late_routers", **vars(outcome)}))
    return 0 if all(outcome.is_whole for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
