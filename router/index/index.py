"""The index of one model: predicts how much of a prompt each source would reuse.

The compiled core (`router/core/index`) decodes the usual form of a batch, counts, places and
matches. It asks for help where help is rare: news of the layout in events goes to the
`LayoutLearner`, and a batch in an unusual form is read by `kvevents.codec` and handed back in the
form that the core knows. The search for an engine's hash function, and the hashes of prompts by it,
are Python's too.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import msgspec

from kvevents.codec import decode, encode
from kvevents.errors import MalformedBatch
from kvevents.events import (
    GPU,
    AllBlocksCleared,
    BlockHash,
    BlockStored,
    CacheLayout,
    Event,
    EventBatch,
)
from kvevents.sealing import held_key
from router._core import Core, HitMap, SharedIndex
from router.index.base import (
    NO_HIT,
    ApplyResult,
    GroupHit,
    HashesFound,
    Hit,
    SourceId,
    SourceLimits,
    SourceStatistics,
    group_hits,
)
from router.index.hash_finder import HashFinder, HashForm
from router.index.layout_learner import LayoutHints, LayoutLearner
from router.index.prompt import Computed, HashedPrompt
from router.index.sources import (
    IndexRecord,
    KnownSource,
    SharedStore,
    SourceRecord,
    StoreRecord,
    decoded_record,
    restore_state,
    source_record,
    statistics_of,
    store_record,
    tier_units,
)

Mapping.register(HitMap)


class PrefixIndex:
    """All sources of a model, and the stores that they share.

    Not thread-safe, with one exception: `prepare` may run in another thread than the rest. No
    method waits or does I/O.
    """

    inline_tokens = 524_288
    """A longer prompt takes more than a few milliseconds to hash: do it in a thread."""

    def __init__(self, limits: SourceLimits | None = None, secret: bytes | None = None) -> None:
        """
        Args:
            secret: Indexes that are made with the same one have the same keys; None: a random one.
        """
        self.limits = limits or SourceLimits()
        drawn = secrets.token_bytes(16) if secret is None else _drawn_from(secret)
        self._secrets: tuple[int, int] = struct.unpack("<2Q", drawn)
        self.core = self._new_core()
        self._stores: dict[str, SharedStore] = {}
        """The stores that some source shares, by name."""
        self._sources: dict[SourceId, KnownSource] = {}
        self._numbers: dict[SourceId, int] = {}
        """See `number_of`."""
        self._slots: dict[SourceId, int] = {}
        """The slots of every source; replaced by another when one comes or goes, since a match
        keeps it."""
        self._searching: dict[SourceId, KnownSource] = {}
        """Sources whose hash function is known, or may be found by a prompt."""
        self._has_leftovers = False
        """True if blocks of dropped sources are left, which no prompt finds."""

    def _new_core(self) -> Core:
        return Core(*self._secrets, astuple(self.limits), NO_HIT, ApplyResult)

    def number_of(self, source: SourceId) -> int:
        """Return what names a source in the core for good, also before it is added and after it was
        dropped."""
        number = self._numbers.get(source)
        if number is None:
            number = self._numbers[source] = self.core.new_number()
        return number

    @property
    def shared(self) -> SharedIndex:
        """The core's index, for other parts of the core; another one after `restore`."""
        return self.core.shared()

    # --- feeding ----------------------------------------------------------------------------------

    def add(self, source: SourceId, hints: LayoutHints | None = None) -> None:
        """Make a source known and empty; its earlier blocks are forgotten.

        Args:
            hints: The configured layout; kept until the source is dropped.
        """
        is_there = self._take_out(source)
        hints = hints or LayoutHints()
        slot = self.core.add(self.number_of(source), tier_units(hints.tiers))
        known = KnownSource(
            slot, LayoutLearner(hints), HashFinder(hints.hash_seeds), self._shared_by(hints)
        )
        if hints.stores:
            stores = [
                (self._stores[each.name].slot, list(each.tiers), each.ownership)
                for each in hints.stores
            ]
            self.core.share(slot, stores)
        self._sources[source] = known
        self._slots = {**self._slots, source: known.slot}
        known.publish_layout(self.core)
        if is_there:
            self._drop_unread_stores()

    def _shared_by(self, hints: LayoutHints) -> tuple[SharedStore, ...]:
        """The stores that are named, made where they are new."""
        for hint in hints.stores:
            if hint.name not in self._stores:
                slot = self.core.add_store(hint.name, tier_units(hints.tiers))
                self._stores[hint.name] = SharedStore(hint.name, slot, hints.tiers)
        return tuple(
            self._stores[name] for name in dict.fromkeys(each.name for each in hints.stores)
        )

    def _drop_unread_stores(self) -> None:
        if not self._stores:
            return
        read = {store.name for known in self._sources.values() for store in known.stores}
        for name in [name for name in self._stores if name not in read]:
            self._has_leftovers |= self.core.drop(self._stores.pop(name).slot)

    def apply(self, source: SourceId, payload: bytes | EventBatch) -> ApplyResult:
        """Apply one batch of events; an unknown source is added.

        Args:
            payload: The batch as it came over the wire, or already decoded.
        Raises:
            MalformedBatch: The payload breaks the format; nothing was applied.
        """
        known = self._sources.get(source)
        if known is None or isinstance(payload, EventBatch):
            return self._apply_slowly(source, payload)
        done = self.core.apply(known.slot, payload)
        if isinstance(done, ApplyResult):
            return done
        if done is None:
            return self._apply_decoded(source, known, decode(payload))
        return self._attend(source, known, done, payload)

    def _attend(
        self,
        source: SourceId,
        known: KnownSource,
        done: tuple[Any, ...] | list[tuple[Any, ...]],
        payload: bytes,
    ) -> ApplyResult:
        """Do what the core cannot do alone: it applied the batch, or has news of the layout."""
        if isinstance(done, tuple):
            return self._result(source, known, done, payload)
        before = known.layout
        for news in done:
            known.learner.see_run(*news)
        known.publish_layout(self.core)
        applied = self.core.apply_reported(known.slot, payload, False, [])
        assert applied is not None
        result = self._result(source, known, applied, payload)
        result.layout_changed = known.layout != before
        return result

    def _apply_slowly(self, source: SourceId, payload: bytes | EventBatch) -> ApplyResult:
        batch = payload if isinstance(payload, EventBatch) else decode(payload)
        if source not in self._sources:
            self.add(source)
        return self._apply_decoded(source, self._sources[source], batch)

    def _apply_decoded(
        self, source: SourceId, known: KnownSource, batch: EventBatch
    ) -> ApplyResult:
        """Apply a batch that Python has read: the core gets it in the one form that it knows."""
        before = known.layout
        is_announced = False
        for event in batch.events:
            if isinstance(event, CacheLayout):
                is_announced = True
                known.learner.see_announcement(event)
                known.finder.see_announcement(event)
            elif isinstance(event, BlockStored):
                known.learner.see_stored(event)
        known.publish_layout(self.core)
        has_chain = known.finder.chain is not None
        self.core.note(known.slot, has_chain, is_announced, False)
        events = [_canonical(event) for event in batch.events if not isinstance(event, CacheLayout)]
        opaque = [number for number, event in enumerate(events) if known.is_opaque(event)]
        payload = encode(EventBatch(batch.ts, events))
        done = self.core.apply_reported(known.slot, payload, True, opaque)
        if done is None:
            raise MalformedBatch(f"batch of {len(events)} events: a value is out of range")
        result = self._result(source, known, done, batch)
        if batch.hides_removals:
            self.core.note(known.slot, known.finder.chain is not None, False, True)
        result.skipped += batch.skipped
        result.unreadable, result.problem = batch.unreadable, batch.problem
        result.is_incomplete |= batch.hides_removals
        result.layout_changed = known.layout != before
        return result

    def _result(
        self,
        source: SourceId,
        known: KnownSource,
        done: tuple[Any, ...],
        payload: bytes | EventBatch,
    ) -> ApplyResult:
        """Return the core's result, with Python's conclusions."""
        (stored, removed, waiting, skipped, overflow, given_up) = done[:6]
        (cleared, is_incomplete, has_lower_tiers, may_show_function, unplaced, slot) = done[6:12]
        for store in done[12]:
            self._lay_out(store, known)
        if slot != known.slot:  # its blocks are left for `tidy`
            known.slot = slot
            self._slots = {**self._slots, source: slot}
            self._has_leftovers = True
        if may_show_function and known.finder.may_find and known.layout is not None:
            self._find_hash_function(known, payload)
        if unplaced or known.unplaced or known.finder.chain is not None:
            known.unplaced = unplaced
            self._sort(source, known)
        is_incomplete |= given_up > 0 and known.finder.chain is None
        return ApplyResult(
            stored,
            removed,
            waiting,
            skipped,
            overflow,
            given_up=given_up,
            cleared=cleared,
            has_lower_tiers=has_lower_tiers,
            is_incomplete=is_incomplete,
        )

    def _lay_out(self, slot: int, writer: KnownSource) -> None:
        """Give sources that share a store the layout of its writer, until their own events show
        theirs."""
        store = next(each for each in writer.stores if each.slot == slot)
        news = (writer.learner.layout, writer.learner.lookahead)
        if news == (store.layout, store.lookahead):
            return
        store.layout, store.lookahead = news
        for known in self._sources.values():
            if store in known.stores:
                known.publish_layout(self.core)

    def _sort(self, source: SourceId, known: KnownSource) -> None:
        """Note whether prompts have to be hashed as the source's engine does."""
        if known.finder.chain is not None or (known.unplaced and known.finder.may_find):
            self._searching[source] = known
        else:
            self._searching.pop(source, None)

    def _find_hash_function(self, known: KnownSource, payload: bytes | EventBatch) -> None:
        layout = known.layout
        assert layout is not None
        batch = payload if isinstance(payload, EventBatch) else decode(payload)
        for event in batch.events:
            if isinstance(event, BlockStored) and known.finder.may_find and event.tier == GPU:
                known.finder.try_event(event, layout.hash_block_size)
        if known.finder.chain is not None:
            self.core.note(known.slot, True, False, False)

    def clear(self, source: SourceId) -> None:
        """Forget a source's blocks and what its events showed; its hints stay."""
        if source in self._sources:
            self.add(source, self._sources[source].learner.hints)

    def drop(self, source: SourceId) -> None:
        """Forget a source altogether; an unknown one is ignored."""
        if self._take_out(source):
            self._drop_unread_stores()

    def _take_out(self, source: SourceId) -> bool:
        """Remove a source from the core; return False if it was unknown."""
        known = self._sources.pop(source, None)
        if known is None:
            return False
        self._searching.pop(source, None)
        self._slots = {each: slot for each, slot in self._slots.items() if each != source}
        self._has_leftovers = self.core.drop(known.slot)
        return True

    def tidy(self) -> bool:
        """Take away, for a millisecond, what is left of sources that were dropped or cleared;
        returns whether to call again. No prompt finds it any more, but it takes memory."""
        self._has_leftovers = self._has_leftovers and self.core.tidy()
        return self._has_leftovers

    # --- asking -----------------------------------------------------------------------------------

    def prepare(
        self,
        token_ids: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
        extra_steps: Sequence[int] = (),
    ) -> HashedPrompt:
        """Hash a prompt, so that matching it is cheap.

        Args:
            cache_salt: The request's salt; only equal salts share blocks.
            extra_keys: Further parts of a block's content, in the form of the events' `extra_keys`:
                one entry per hash block.
            extra_steps: Steps in tokens for which the caller will ask `prefix_keys`.
        """
        prompt = HashedPrompt(self.core, token_ids, lora_name, cache_salt, extra_keys)
        self.core.hash(prompt.hashed)
        for step in extra_steps:
            prompt.prefix_keys(step)
        return prompt

    def match_prompt(self, prompt: HashedPrompt) -> Mapping[SourceId, Hit]:
        """Return how much of a prompt each source would reuse, for every known source. The hits are
        those of this moment, even if the index changes while they are read."""
        return self.core.match(prompt.hashed, self._slots, self.computed(prompt))

    def match(
        self,
        token_ids: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> Mapping[SourceId, Hit]:
        """Call `prepare` and `match_prompt`."""
        return self.match_prompt(self.prepare(token_ids, lora_name, cache_salt, extra_keys))

    # What whole decisions in the core need.

    @property
    def slots(self) -> Mapping[SourceId, int]:
        """The slot of every source. Another mapping when one comes or goes, and never changed
        itself."""
        return self._slots

    @property
    def searches(self) -> bool:
        """Return whether some source's blocks are found only by its engine's own hashes of a
        prompt."""
        return bool(self._searching)

    def computed(self, prompt: HashedPrompt) -> list[Computed]:
        """A prompt's hashes by the engines of those sources where blocks are only found by them."""
        computed: list[Computed] = []
        if self._searching and len(prompt.hashed) >= 2:
            for source, known in list(self._searching.items()):
                computed += self._computed(source, known, prompt)
        return computed

    def explain(self, prompt: HashedPrompt, source: SourceId) -> tuple[GroupHit, ...]:
        """Return the prefix that each group of a source would allow, by group index.

        Args:
            source: Empty where it is unknown, or its layout is.
        """
        known = self._sources.get(source)
        layout = known.layout if known else None
        if known is None or layout is None or len(prompt.hashed) < 2:
            return ()
        computed = self._computed(source, known, prompt)
        accepted = self.core.group_hits(prompt.hashed, known.slot, computed)
        return group_hits(layout, accepted)

    def match_hashes(
        self, source: SourceId, hashes: Sequence[BlockHash], block_size: int | None = None
    ) -> HashesFound:
        """Find a source's hit for a prompt of which there are only its engine's own hashes.

        Args:
            source: No hit where it is unknown.
            hashes: One a hash block, from the first on, in the form of the engine's events. The
                prompt is taken to go on behind them.
            block_size: Tokens that the caller takes a hash to stand for; None: not checked.
        """
        known = self._sources.get(source)
        layout = known.layout if known else None
        if known is None or layout is None:
            return HashesFound(NO_HIT, (), 0, "its cache layout is not known yet")
        key_id = None if known.finder.known is None else known.finder.known.key_id
        key = None if key_id is None else held_key(key_id)
        if key is not None:
            hashes = [key.seal(each) if isinstance(each, bytes) else each for each in hashes]
        numbers = self.core.hash_numbers(list(hashes))
        hit, accepted, held, is_whole = self.core.match_hashes(known.slot, numbers)
        problem = None
        if not held:
            problem = known.finder.key_problem or (
                "it holds none of these hashes: nothing of the prompt, or its engine has others"
            )
        elif block_size not in (None, layout.hash_block_size):
            problem = f"its hashes stand for {layout.hash_block_size} tokens each"
        elif not is_whole:
            problem = "a tier below its GPU has blocks of its own, under other hashes"
        return HashesFound(hit, group_hits(layout, accepted), held, problem)

    def computed_of(
        self, source: SourceId, prompts: Iterable[HashedPrompt]
    ) -> list[list[Computed]]:
        """Return each prompt's hashes by the source's engine, where blocks are only found by them;
        empty where no prompt needs any."""
        known = self._sources.get(source)
        if known is None or source not in self._searching:
            return []
        return [self._computed(source, known, prompt) for prompt in prompts]

    def _computed(
        self, source: SourceId, known: KnownSource, prompt: HashedPrompt
    ) -> list[Computed]:
        """A prompt's hashes by a source's engine, where blocks are only found by them."""
        layout, finder, slot = known.layout, known.finder, known.slot
        if layout is None:
            return []
        step = layout.hash_block_size
        if known.unplaced and finder.may_find:
            holds = partial(self.core.holds_hash, slot)
            spellings = prompt.spellings(step)
            finder.try_prompt(prompt.token_ids, spellings, step, known.learner.lookahead, holds)
            self.core.note(slot, finder.chain is not None, False, False)
            self._sort(source, known)
        if finder.chain is None:
            return []
        # Salts that events hide make learned places doubtful: only the engine's own hash decides.
        is_alone = self.core.hides_extra_keys(slot) and prompt.lora_name is None
        if not is_alone and not (known.unplaced or (known.stores and self.core.has_unplaced(slot))):
            return []
        as_int = self.core.uses_int_hashes(slot)
        hashes = prompt.core_hashes(HashForm(finder.chain, step, known.lookahead, as_int))
        return [(slot, is_alone, hashes)]

    # --- sharing ----------------------------------------------------------------------------------

    @property
    def key_space(self) -> bytes:
        """A digest of the secret that prefix keys are made with. Equal where another index gives
        equal keys to equal prefixes: both were made with one secret. Empty where keys are of no use
        elsewhere."""
        packed = struct.pack("<2Q", *self._secrets)
        return hashlib.blake2b(packed, digest_size=8, person=b"key space").digest()

    # --- keeping ----------------------------------------------------------------------------------

    def export(self, only: SourceId | None = None) -> Iterator[bytes]:
        """The whole state as records, which a snapshot frames; of one source where *only* names it.

        Their form is the index's own, and none is empty. A source's record is made when it
        is asked for, so events may be applied in between.
        """
        wanted = [each for each in self._sources if only is None or each == only]
        stores = {store.name: store for each in wanted for store in self._sources[each].stores}
        shared = [store_record(self.core, store) for store in stores.values()]
        yield msgspec.msgpack.encode(IndexRecord("native", self._secrets, shared))
        for source in wanted:
            if source in self._sources:
                yield msgspec.msgpack.encode(
                    source_record(self.core, source, self._sources[source])
                )

    def restore(self, records: Iterable[bytes | memoryview]) -> None:
        """Take over an exported state; the present one is forgotten.

        Raises:
            DumpError: Another implementation wrote the records, or they make no sense. Nothing has
                changed.
        """
        remaining = iter(records)
        head = decoded_record(next(remaining, b""), IndexRecord)
        restored = PrefixIndex(self.limits)
        restored._secrets = head.secrets
        restored.core = restored._new_core()
        for store in head.stores:
            restored._take_store(store)
        for record in remaining:
            restored._take(decoded_record(record, SourceRecord))
        restored._drop_unread_stores()
        self.__dict__.update(restored.__dict__)

    def _take_store(self, record: StoreRecord) -> None:
        slot = self.core.add_store(record.name, tier_units(record.tiers))
        self._stores[record.name] = SharedStore(
            record.name, slot, record.tiers, record.layout, record.lookahead
        )
        restore_state(self.core, slot, record.state, f"store {record.name!r}")

    def _take(self, record: SourceRecord) -> None:
        self.add(record.source, record.hints)
        known = self._sources[record.source]
        known.learner = LayoutLearner(
            record.hints,
            lookahead=record.lookahead,
            announced=record.announced,
            seen=record.seen,
            tiers_seen=record.tiers_seen,
            smallest_step=record.smallest_step,
        )
        known.finder.take(record.chain)
        known.publish_layout(self.core)
        restore_state(self.core, known.slot, record.state, str(record.source))
        self.core.note(known.slot, record.chain is not None, False, False)
        known.unplaced = self.core.unplaced(known.slot)
        self._sort(record.source, known)

    # --- looking ----------------------------------------------------------------------------------

    def holds(self, source: SourceId) -> bool:
        return source in self._sources

    def announced(self, source: SourceId) -> CacheLayout | None:
        """Return the layout that a source's publisher announced; None where it announced none, or
        the source is unknown."""
        known = self._sources.get(source)
        return known.learner.announced if known else None

    def statistics(self) -> dict[SourceId, SourceStatistics]:
        return {source: statistics_of(self.core, known) for source, known in self._sources.items()}


def _drawn_from(secret: bytes) -> bytes:
    """Return 16 bytes that stand for a secret in the keys of prefixes."""
    return hashlib.blake2b(secret, digest_size=16, person=b"native keys").digest()


def _canonical(event: Event) -> Event:
    """Return the event with its tier spelled out, but for a clear that names none: it may mean
    several."""
    assert not isinstance(event, CacheLayout)
    tier = event.tier
    if event.medium == tier or (isinstance(event, AllBlocksCleared) and not event.medium):
        return event
    return msgspec.structs.replace(event, medium=tier)
