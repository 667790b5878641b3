"""A scheduler without a model around a `CacheManager`.

It records what every page holds and checks everything that is read. A page's content is a list with
one entry per token: a number that identifies the whole prefix up to that token, or for a state, the
prefix it was computed from. A request must only ever read its own prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvevents.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event, GroupIdx
from kvevents.hashing import HashChain
from kvevents.layout import GroupKind, KVCacheGroup
from offload.block import Block
from offload.block_pool import BlockPool
from offload.cache_manager import CacheManager
from offload.config import CacheConfig
from offload.coordinator import ComputedBlocks
from offload.request import CacheRequest, RequestHasher
from tests.support.engine_model import defined_hit

ENCODER_TOKENS = 10
"""The number of encoder tokens that cross attention holds for every request."""
CHAIN = HashChain.from_seed("sha256", "a seed")


@dataclass
class Job:
    """A request that is running or waiting."""

    request: CacheRequest
    target_tokens: int
    """The length at which it stops: prompt and output."""
    seed: int
    """Makes its output differ from that of other jobs."""
    prefixes: list[int] = field(default_factory=list)

    def prefix(self, position: int) -> int:
        """The number that identifies the tokens up to and including *position*."""
        while len(self.prefixes) <= position:
            index = len(self.prefixes)
            before = self.prefixes[-1] if self.prefixes else hash((self.request.lora_name, "root"))
            self.prefixes.append(hash((before, self.request.token_ids[index])))
        return self.prefixes[position]

    @property
    def is_done(self) -> bool:
        return (
            self.request.num_computed_tokens >= self.target_tokens - 1
            and self.request.num_tokens >= self.target_tokens
        )


class Pages:
    """What every page holds, by block id and slot."""

    def __init__(self) -> None:
        self._content: dict[int, dict[int, int]] = {}

    def read(self, block_id: int, slot: int) -> int | None:
        return self._content.get(block_id, {}).get(slot)

    def write(self, block_id: int, slot: int, value: int) -> None:
        """Write a slot. Slots are written in order: writing the first makes it a new page."""
        if slot == 0:
            self._content[block_id] = {}
        self._content[block_id][slot] = value


class CacheDriver:
    """Admits, computes, preempts and finishes requests.

    It checks that the cache provides what a model would need.
    """

    def __init__(self, config: CacheConfig, pages: Pages | None = None) -> None:
        self.config = config
        self.cache = CacheManager(config, config.scheduler_block_size)
        self.hasher = RequestHasher(CHAIN, config.layout.hash_block_size)
        self.running: dict[str, Job] = {}
        self.pages = pages or Pages()
        self.present: set[tuple[int, BlockHash]] = set()
        """What is cached according to the events."""
        self.events: list[Event] = []
        """The events of the last step."""
        self.counts: Counter[str] = Counter()
        self._serial = 0

    # --- what a scheduler does --------------------------------------------------------------------

    def new(
        self, prompt: Sequence[int], output_tokens: int = 1, lora_name: str | None = None
    ) -> Job:
        """Make a request that holds nothing yet."""
        self._serial += 1
        request = CacheRequest(f"request-{self._serial}", prompt, self.hasher, lora_name)
        return Job(request, len(prompt) + output_tokens, self._serial)

    def admit(self, sequence: Job, budget: int, must_fit: bool = False) -> bool:
        """Let a new request compute its first *budget* tokens behind its hit."""
        request = sequence.request
        computed = self.cache.get_computed_blocks(request)
        self._check_hit(sequence, computed)
        new = min(budget, request.num_tokens - computed.num_tokens)
        before = self.snapshot()
        given = self.cache.allocate_slots(
            request,
            new,
            computed,
            num_encoder_tokens=ENCODER_TOKENS,
            full_sequence_must_fit=must_fit,
        )
        if given is None:
            assert self.snapshot() == before, "a refused request changed something"
            self.counts["refused"] += 1
            return False
        self.counts["admitted"] += 1
        self.counts["hits"] += computed.num_tokens > 0
        request.num_computed_tokens = computed.num_tokens
        self.running[request.request_id] = sequence
        self._compute(sequence, new)
        return True

    def advance(self, sequence: Job, budget: int, lookahead: int = 0) -> bool:
        """Let a running request compute up to *budget* tokens; preempts it if it does not fit."""
        request = sequence.request
        new = min(budget, request.num_tokens - request.num_computed_tokens)
        before = self.snapshot()
        if self.cache.allocate_slots(request, new, num_lookahead_tokens=lookahead) is None:
            assert self.snapshot() == before, "a refused request changed something"
            self.counts["preempted"] += 1
            self.preempt(sequence)
            return False
        self._compute(sequence, new)
        return True

    def preempt(self, sequence: Job) -> None:
        """Take all blocks from a running request."""
        self.finish(sequence)
        sequence.request.num_computed_tokens = 0

    def finish(self, sequence: Job) -> None:
        """End a request and free its blocks."""
        self.cache.free(sequence.request.request_id)
        del self.running[sequence.request.request_id]

    def end_step(self) -> None:
        """Take the events of the step, and check them and the pool."""
        self.events = self.cache.take_events()
        self._replay(self.events)
        self.check_invariants()
        self.cache.start_step()

    # --- what a model does ------------------------------------------------------------------------

    def _compute(self, sequence: Job, count: int) -> None:
        """Read what the first new token attends to, write the new tokens, and generate the next."""
        request = sequence.request
        start = request.num_computed_tokens
        stop = start + count
        for group, table in zip(
            self.config.layout.groups, self.cache.block_tables(request.request_id), strict=True
        ):
            self._read(sequence, group, table, start)
            self._write(sequence, group, table, start, stop)
        request.num_computed_tokens = stop
        if stop == request.num_tokens < sequence.target_tokens:
            request.append([1000 + (sequence.seed * 31 + stop) % 50])

    def _read(self, sequence: Job, group: KVCacheGroup, table: Sequence[Block], start: int) -> None:
        size = group.block_size
        for position in positions_read(group, start):
            block = table[position // size]
            assert not block.is_null, (group, position, start)
            slot = 0 if group.kind is GroupKind.MAMBA else position % size
            assert self.pages.read(block.block_id, slot) == sequence.prefix(position), (
                group,
                position,
                start,
            )

    def _write(
        self, sequence: Job, group: KVCacheGroup, table: Sequence[Block], start: int, stop: int
    ) -> None:
        size = group.block_size
        if group.kind is GroupKind.NOT_CACHED:
            assert len(table) * size >= ENCODER_TOKENS
            return
        if group.kind is GroupKind.MAMBA:
            self.pages.write(
                self._writable(table[(stop - 1) // size]), 0, sequence.prefix(stop - 1)
            )
            return
        for position in range(start, stop):
            self.pages.write(
                self._writable(table[position // size]), position % size, sequence.prefix(position)
            )

    def _writable(self, block: Block) -> int:
        assert not block.is_null
        assert block.ref_count == 1, "a block that others read is written"
        return block.block_id

    # --- what must always hold --------------------------------------------------------------------

    def _check_hit(self, sequence: Job, computed: ComputedBlocks) -> None:
        assert computed.num_tokens == self.expected_hit(sequence.request)
        for group, table in zip(self.config.layout.groups, computed.blocks, strict=True):
            if group.kind is not GroupKind.NOT_CACHED:
                assert len(table) * group.block_size == computed.num_tokens
                self._read(sequence, group, table, computed.num_tokens)

    def expected_hit(self, request: CacheRequest) -> int:
        """The hit by the definition of the rule, over what is cached now."""
        if not self.config.enable_caching:
            return 0
        step = self.config.layout.hash_block_size
        reach = len(request.block_hashes) * step

        def has(group: int, end: int) -> bool:
            return end <= reach and request.block_hashes[end // step - 1] in self.cache.pool.cached(
                GroupIdx(group)
            )

        return defined_hit(self.config.layout, has, request.num_tokens - 1, reach)

    def check_invariants(self) -> None:
        """Check that counts add up, that no block is both free and held, and that the events
        rebuild the cache."""
        pool = self.cache.pool
        free = free_ids(pool)
        held = Counter(
            block.block_id for table in self._tables() for block in table if not block.is_null
        )
        held += self.held_by_copies()
        assert len(free) == len(set(free)) == pool.num_free_blocks
        assert not set(free) & set(held)
        assert len(free) + len(held) == self.config.num_blocks - 1
        assert pool.null_block.block_id not in (set(free) | set(held))
        for table in self._tables():
            for block in table:
                assert block.is_null or block.ref_count == held[block.block_id]
        assert self.present == set(self._cached())
        self.cache.check_integrity(self.held_by_copies())

    def held_by_copies(self) -> Counter[int]:
        """References in addition to those of requests."""
        return Counter()

    def _tables(self) -> Iterator[Sequence[Block]]:
        for request_id in self.running:
            yield from self.cache.block_tables(request_id)

    def _cached(self) -> Iterator[tuple[int, BlockHash]]:
        for manager in self.cache.coordinator.managers:
            cached = self.cache.pool.cached(manager.group_idx)
            for block_hash in cached:
                block = cached.get(block_hash)
                assert block is not None
                assert (block.block_hash, block.group_idx) == (block_hash, manager.group_idx)
                yield manager.group_idx, block_hash

    def snapshot(self) -> object:
        """Everything that a refused call must leave unchanged."""
        tables = [[block.block_id for block in table] for table in self._tables()]
        return free_ids(self.cache.pool), tables, sorted(map(repr, self._cached()))

    def _replay(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.present.clear()
            elif isinstance(event, BlockRemoved):
                gone = {(event.group_idx or 0, block_hash) for block_hash in event.block_hashes}
                assert gone <= self.present, "removed what was not there"
                self.present -= gone
            elif isinstance(event, BlockStored):
                self._check_stored(event)
                self.present |= {
                    (event.group_idx or 0, block_hash) for block_hash in event.block_hashes
                }
        removed = [event.group_idx for event in events if isinstance(event, BlockRemoved)]
        assert len(removed) == len(set(removed)), "a group's removals travel in one event"

    def _check_stored(self, event: BlockStored) -> None:
        """Check that the tokens of the event, after its parent, are those that its hashes cover."""
        assert event.group_idx is not None
        size, step = (
            self.config.layout.groups[event.group_idx].block_size,
            self.config.layout.hash_block_size,
        )
        assert len(event.token_ids) == len(event.block_hashes) * size
        assert event.block_size is None
        extra = (
            [(("lora", event.lora_name),)] * (len(event.token_ids) // step)
            if event.lora_name
            else []
        )
        chain = HashChain(CHAIN.algorithm, event.parent_block_hash or CHAIN.none_hash)  # type: ignore[arg-type]
        hashes = list(chain.block_hashes(event.token_ids, step, extra))
        assert hashes[size // step - 1 :: size // step] == event.block_hashes
        known = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
        assert not known & self.present, "stored what was there"


def free_ids(pool: BlockPool) -> list[int]:
    """Ids of the free blocks, in the order in which they will be allocated."""
    return [block.block_id for block in pool.free_queue.blocks()]


def positions_read(group: KVCacheGroup, position: int) -> Sequence[int]:
    """The earlier positions that the token at *position* attends to."""
    if position == 0 or group.kind is GroupKind.NOT_CACHED:
        return ()
    if group.kind is GroupKind.MAMBA:
        return (position - 1,)
    first = 0
    if group.kind is GroupKind.SLIDING_WINDOW:
        assert group.sliding_window is not None
        first = max(0, position - group.sliding_window + 1)
    elif group.kind is GroupKind.CHUNKED_LOCAL:
        assert group.attention_chunk_size is not None
        first = position // group.attention_chunk_size * group.attention_chunk_size
    return range(first, position)
