"""An engine stub whose cache has two groups and a tier below the GPU."""

from __future__ import annotations

from collections.abc import Sequence

from kvevents.layout import KVCacheLayout
from kvevents.publisher import ZmqEventPublisher
from kvevents.publisher_config import PublisherConfig
from tests.support.blocks import FULL, Prefix, window
from tests.support.engine_stub import BLOCK, TOPIC, EngineStub

WINDOW = window(64)
LAYOUT = KVCacheLayout.build([FULL, WINDOW])


class HybridStub(EngineStub):
    """Full attention and a sliding window of 64 tokens."""

    heartbeat_s = 0.2

    @property
    def sources(self) -> int:
        return 1

    @property
    def event_endpoint(self) -> str:
        return self._kv_addresses[0]

    async def start(self) -> None:
        await super().start()
        endpoint, replay = self._kv_addresses
        config = PublisherConfig(
            endpoint=endpoint, replay_endpoint=replay, topic=TOPIC, heartbeat_s=self.heartbeat_s
        )
        self._publisher = ZmqEventPublisher(config, LAYOUT)

    def store(self, ids: Sequence[int]) -> None:
        """Cache the prompt in both groups."""
        assert self._publisher is not None
        whole = _whole_blocks(ids)
        self._prompts.append(whole)
        prefix = Prefix(whole)
        self._publisher.publish([prefix.stored(0, FULL), prefix.stored(1, WINDOW)])
        self.stored_blocks += 2 * len(whole) // BLOCK

    def slide_on(self, ids: Sequence[int]) -> None:
        """Move the window past the prompt: its blocks are evicted, full attention's stay, and there
        is no hit."""
        assert self._publisher is not None
        whole = _whole_blocks(ids)
        self._prompts.remove(whole)
        self._publisher.publish([Prefix(whole).removed(1, range(BLOCK, len(whole) + 1, BLOCK))])
        self.stored_blocks -= len(whole) // BLOCK

    def evict(self, ids: Sequence[int]) -> None:
        """Full attention loses what the window has left behind already."""
        assert self._publisher is not None
        whole = _whole_blocks(ids)
        self._publisher.publish([Prefix(whole).removed(0, range(BLOCK, len(whole) + 1, BLOCK))])
        self.stored_blocks -= len(whole) // BLOCK

    def offload(self, ids: Sequence[int], tier: str = "CPU") -> None:
        """Move both groups from the GPU to another tier, where the hit is the same."""
        assert self._publisher is not None
        whole = _whole_blocks(ids)
        prefix, ends = Prefix(whole), range(BLOCK, len(whole) + 1, BLOCK)
        self._publisher.publish([prefix.offloaded(group, ends, tier) for group in (0, 1)])
        self._publisher.publish([prefix.removed(group, ends) for group in (0, 1)])


def _whole_blocks(ids: Sequence[int]) -> list[int]:
    return list(ids[: len(ids) // BLOCK * BLOCK])
