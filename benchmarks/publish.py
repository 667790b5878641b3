"""What does publishing cost the engine's thread, and how many events a second reach a subscriber?

The peer in the same run is what an engine would do without the library: encode and send on its own
thread.
"""

from __future__ import annotations

import argparse
import statistics
import time

import zmq

from benchmarks.figures import BLOCK_SIZE, prompt_tokens, report, stored_events
from kvevents.codec import encode
from kvevents.events import BlockStored, EventBatch
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from kvevents.publisher import create_publisher
from kvevents.publisher_config import PublisherConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=5000)
    parser.add_argument("--blocks-per-event", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--pause-us",
        type=float,
        default=200.0,
        help="between two batches, as an engine's steps have it",
    )
    options = parser.parse_args()
    for size in options.blocks_per_event:
        _measure(options.batches, size, options.pause_us * 1e-6)


def _measure(batches: int, blocks: int, pause_s: float) -> None:
    events = list(stored_events(prompt_tokens(batches * blocks * BLOCK_SIZE), blocks))
    ours, dropped = _through_publisher(events, pause_s)
    direct = _on_own_thread(events, pause_s)
    report(
        "publish",
        blocks_per_event=blocks,
        publish_us_p50=round(statistics.median(ours) * 1e6, 2),
        publish_us_p99=round(_quantile(ours, 0.99) * 1e6, 2),
        own_thread_us_p50=round(statistics.median(direct) * 1e6, 2),
        own_thread_us_p99=round(_quantile(direct, 0.99) * 1e6, 2),
        ratio=round(statistics.median(ours) / statistics.median(direct), 3),
        dropped=dropped,
    )


def _through_publisher(events: list[BlockStored], pause_s: float) -> tuple[list[float], int]:
    layout = KVCacheLayout.build([KVCacheGroup(GroupKind.FULL, BLOCK_SIZE)])
    with create_publisher(PublisherConfig(endpoint="tcp://127.0.0.1:0"), layout) as publisher:
        seconds = [
            _timed(lambda event=event: publisher.publish([event]), pause_s) for event in events
        ]  # type: ignore[misc]
        return seconds, publisher.statistics().stream.dropped


def _on_own_thread(events: list[BlockStored], pause_s: float) -> list[float]:
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.bind("tcp://127.0.0.1:*")
    try:
        return [
            _timed(
                lambda event=event: socket.send_multipart(
                    [b"", b"\0" * 8, encode(EventBatch(0.0, [event], 0))]
                ),
                pause_s,
            )  # type: ignore[misc]
            for event in events
        ]
    finally:
        socket.close(linger=0)
        context.term()


def _timed(action: object, pause_s: float) -> float:
    assert callable(action)
    start = time.perf_counter()
    action()
    end = time.perf_counter()
    while time.perf_counter() - end < pause_s:
        time.sleep(0)
    return end - start


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


if __name__ == "__main__":
    main()
