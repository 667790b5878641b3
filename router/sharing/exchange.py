"""Publishes what this router knows over a board, and takes over what others publish.

Their requests count as load. What is being computed for them counts as if it had been sent there
from here; what several sent there before they knew of each other counts once, since the engine
computes it once. What an engine counted before they published it is not foreign any more. A replica
that one of them finds unhealthy is checked at once, and believed to be if that check fails: a
router that is cut off must not take the fleet from the others. A moment with their requests is not
quiet, so predictions made in it prove nothing.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from router.config.extras import import_extra
from router.config.sharing import BoardConfig
from router.errors import ConfigError, ConfigProblem
from router.fleet.limits import KeyLimits
from router.fleet.load import LoadTracker, ReplicaLoad, sum_of
from router.fleet.quiet_moments import QuietMoments
from router.fleet.registry import ReplicaRegistry
from router.fleet.types import ReplicaState
from router.index.base import SourceId, pack_keys, unpack_keys
from router.index.mirror import Mirror
from router.index.mirror_types import STEP, Prefilling
from router.routing.model import Model
from router.routing.recent_prefixes import RecentPrefixes
from router.sharing.board import MOST_DELAY_S, Board
from router.sharing.slots import MAX_KEYS, SharedLoad, SharedPrefix, Slot, fitting

MAX_COMPARED = 16
"""The most prompts at one cache that one with the same beginning is compared with."""


@dataclass(eq=False, repr=False)
class Sharing:
    """One process's side of the board. Belongs to one event loop."""

    load: LoadTracker
    mirror: Mirror
    recent: RecentPrefixes
    registry: ReplicaRegistry
    quiet: QuietMoments
    model_of: Callable[[str], Model | None]
    """Returns a model by its name: its index reads the keys of prefixes."""
    keys: KeyLimits
    clock: Callable[[], float] = time.monotonic
    """A monotonic clock, in seconds."""

    def __post_init__(self) -> None:
        self._packed: dict[int, SharedPrefix] = {}
        self._known: dict[tuple[str, int], Prefilling] = {}
        """The prompts of others, by writer and number."""
        self._foreign: set[tuple[str, int]] = set()
        """Those that are of no use, and counted; they arrive again with every slot of the
        writer."""
        self._unhealthy: dict[str, frozenset[str]] = {}
        self._begun: dict[str, Mapping[str, int]] = {}
        self.foreign_prefixes = 0
        """Prompts that arrived and are of no use, since their keys were made with another
        secret."""

    # --- publishing -------------------------------------------------------------------------------

    def collect(self) -> Slot:
        return Slot(
            loads=tuple(
                SharedLoad(
                    replica,
                    rank,
                    load.prefilling_requests,
                    max(load.prefill_tokens, 0),
                    load.decoding_requests,
                    max(load.context_tokens, 0),
                )
                for replica, rank, load in self.load.places()
                if load.requests
            ),
            prefixes=fitting(self._prefixes()),
            unhealthy=tuple(
                replica.id
                for replica in self.registry.replicas()
                if replica.record.health is ReplicaState.UNHEALTHY
            ),
            begun=self.quiet.begun(),
            keys=self.keys.counts(),
        )

    def _prefixes(self) -> list[SharedPrefix]:
        packed = self._packed
        self._packed = {
            each.number: self._pack(each, packed.get(each.number))
            for each in self.mirror.prefilling()
        }
        return [prefix for prefix in self._packed.values() if prefix.key_space]

    def _pack(self, each: Prefilling, before: SharedPrefix | None) -> SharedPrefix:
        if before is not None:
            if before.queued_tokens == each.queued_tokens:
                return before
            return msgspec.structs.replace(before, queued_tokens=each.queued_tokens)
        model = self.model_of(each.model)
        return SharedPrefix(
            each.number,
            each.model,
            b"" if model is None else model.index.key_space,
            each.source.replica,
            each.source.dp_rank,
            each.tokens,
            each.queued_tokens,
            pack_keys(each.keys[:MAX_KEYS]),
        )

    # --- receiving --------------------------------------------------------------------------------

    def take(self, slots: Mapping[str, Slot]) -> None:
        """Take over what all others publish, in place of what they published before.

        Args:
            slots: By writer; one that is missing is gone.
        """
        received = self._prefilling(slots)
        twice = _queued_twice([*self.mirror.prefilling(), *received])
        loads = _summed(slots, twice)
        self.load.take_others(loads)
        self.registry.others_reported([at for at in loads if isinstance(at, str)], MOST_DELAY_S)
        self.keys.take_elsewhere(slot.keys for slot in slots.values())
        self.mirror.take_others(received)
        now = self.clock()
        for writer, slot in slots.items():
            known = self._begun.get(writer)
            if known is not None:
                for replica, count in slot.begun.items():
                    if count != known.get(replica, 0) and replica in self.registry:
                        self.quiet.disturbed(replica, now)
            for replica in frozenset(slot.unhealthy) - self._unhealthy.get(writer, frozenset()):
                self.registry.mark_suspect(replica)
        self._begun = {writer: slot.begun for writer, slot in slots.items()}
        self._unhealthy = {writer: frozenset(slot.unhealthy) for writer, slot in slots.items()}

    def _prefilling(self, slots: Mapping[str, Slot]) -> list[Prefilling]:
        """Return what is being computed for others. Each prompt is remembered as sent when it first
        arrives here."""
        known, self._known = self._known, {}
        self._foreign &= {(name, each.number) for name, at in slots.items() for each in at.prefixes}
        now = self.clock()
        for writer, slot in slots.items():
            for prefix in slot.prefixes:
                name = writer, prefix.number
                received = known.get(name)
                if received is None:
                    received = self._received(name, prefix)
                    if received is None:
                        continue
                    self.recent.remember(received.source, received.keys, now)
                received.queued_tokens = prefix.queued_tokens
                self._known[name] = received
        return list(self._known.values())

    def _received(self, name: tuple[str, int], prefix: SharedPrefix) -> Prefilling | None:
        model = self.model_of(prefix.model)
        if model is None or prefix.replica not in self.registry or not prefix.keys:
            return None
        if prefix.key_space != model.index.key_space:
            self.foreign_prefixes += name not in self._foreign
            self._foreign.add(name)
            return None
        return Prefilling(
            prefix.number,
            prefix.model,
            SourceId(prefix.replica, prefix.dp_rank),
            prefix.tokens,
            prefix.queued_tokens,
            unpack_keys(prefix.keys),
        )


def valkey_board(config: BoardConfig, secret: bytes | None) -> Board | None:
    """The board on a server; None if no server is configured.

    Raises:
        ConfigError: The client library is missing, or a certificate cannot be read.
    """
    if config.url is None or secret is None:
        return None
    module = import_extra("router.sharing.valkey", "valkey", "board.url", None)
    for name in ("ca", "certificate", "key"):
        path = getattr(config, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError([ConfigProblem(f"board.{name}", f"{path}: no such file")])
    board: Board = module.connect(config, secret)
    return board


def _summed(
    slots: Mapping[str, Slot], twice: Mapping[SourceId, int]
) -> dict[str | tuple[str, int], ReplicaLoad]:
    total: dict[str | tuple[str, int], ReplicaLoad] = {}
    for slot in slots.values():
        for load in slot.loads:
            rank = load.dp_rank
            place = load.replica if rank is None else (load.replica, rank)
            found = ReplicaLoad(
                load.prefilling_requests,
                load.prefill_tokens,
                load.decoding_requests,
                load.context_tokens,
            )
            known = total.get(place)
            total[place] = found if known is None else sum_of(known, found)
    for source, tokens in twice.items():
        for place in (source.replica, (source.replica, source.dp_rank)):
            queue = total.get(place)
            if queue is not None:
                queue.prefill_tokens = max(queue.prefill_tokens - tokens, 0)
    return total


def _queued_twice(prompts: Iterable[Prefilling]) -> Counter[SourceId]:
    """Return, of the tokens that wait at each cache, those that are counted for more than one
    prompt."""
    alike: dict[tuple[SourceId, int], list[Prefilling]] = {}
    for each in prompts:
        if each.queued_tokens and each.keys:
            alike.setdefault((each.source, each.keys[0]), []).append(each)
    twice: Counter[SourceId] = Counter()
    for (source, _), group in alike.items():
        group.sort(key=_cached_tokens)
        for number, each in enumerate(group):
            compared = group[: min(number, MAX_COMPARED)]
            twice[source] += max((_queued_in_both(each, other) for other in compared), default=0)
    return twice


def _cached_tokens(prompt: Prefilling) -> int:
    return prompt.tokens - prompt.queued_tokens


def _queued_in_both(one: Prefilling, other: Prefilling) -> int:
    # Of equal prompts, an engine computes the last token of each.
    equal = _are_equal(one, other)
    shared = one.tokens - 1 if equal else STEP * _shared_keys(one.keys, other.keys)
    return max(shared - max(_cached_tokens(one), _cached_tokens(other)), 0)


def _are_equal(one: Prefilling, other: Prefilling) -> bool:
    """Return whether two are as long, and equal up to the last key."""
    alike = len(one.keys) == len(other.keys) and one.keys[-1] == other.keys[-1]
    return alike and one.tokens == other.tokens


def _shared_keys(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading keys two prompts share. A key stands for all that is before it."""
    most = range(min(len(one), len(other)))
    return bisect_left(most, True, key=lambda place: one[place] != other[place])
