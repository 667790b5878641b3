"""Keys, and a tier used as a plain cache: one access at a time, copies done at once."""

from __future__ import annotations

from collections.abc import Iterable

from kvevents.events import GroupIdx
from offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    RequestContext,
    pack_offload_key,
)

REQUEST = RequestContext("request")


def key(number: int, group: int = 0) -> OffloadKey:
    return pack_offload_key(number.to_bytes(4, "big"), GroupIdx(group))


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(number) for number in numbers]


def store(tier: OffloadingManager, *numbers: int) -> None:
    """Store blocks that the tier has room for, in one call."""
    output = tier.prepare_store(keys(*numbers), REQUEST)
    assert output is not None
    tier.complete_store(output.keys_to_store, REQUEST)


def access(tier: OffloadingManager, number: int) -> bool:
    """One access of a plain cache: a hit is touched, a miss is stored. Returns whether it hit."""
    if tier.lookup(key(number), REQUEST) is LookupResult.HIT:
        tier.touch([key(number)], REQUEST)
        return True
    store(tier, number)
    return False


def hits(tier: OffloadingManager, numbers: Iterable[int]) -> set[int]:
    return {number for number in numbers if tier.lookup(key(number), REQUEST) is LookupResult.HIT}


def replayed(events: Iterable[OffloadingEvent], held: set[OffloadKey]) -> set[OffloadKey]:
    """What a consumer that knew *held* holds after the events.

    Every event must change something: a key's events alternate.
    """
    present = set(held)
    for event in events:
        assert event.keys
        assert len(set(event.keys)) == len(event.keys)
        if event.removed:
            assert present >= set(event.keys)
            present -= set(event.keys)
        else:
            assert present.isdisjoint(event.keys)
            present |= set(event.keys)
    return present
