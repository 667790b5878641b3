"""What the compiled index keeps after blocks, runs and tiers have come and gone: memory follows
what sources hold, not what they have ever held."""

from __future__ import annotations

from kvevents.codec import encode
from kvevents.events import AllBlocksCleared, BlockStored, Event, EventBatch
from router.index.base import SourceLimits
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints
from tests.support.blocks import FULL, SOURCE, Prefix, tokens
from tests.support.index import blocks_held

MANY = 20_000
LONG = Prefix(tokens(16 * MANY))
ENDS = range(16, 16 * MANY + 1, 16)
EMPTY = 64 * 1024
"""Bytes that an index of few blocks may keep: a page of nodes has 40 KB."""


def created(**limits: int) -> PrefixIndex:
    index = PrefixIndex(limits=SourceLimits(**limits))
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    return index


def apply(index: PrefixIndex, *events: Event) -> None:
    index.apply(SOURCE, encode(EventBatch(0.0, list(events), 0)))


def memory(index: PrefixIndex) -> int:
    return index.core.sizes()[1]


def test_pages_of_blocks_that_went_are_given_back() -> None:
    """A replica that is drained does not hold the router's memory."""
    index = created(forgotten=0)
    apply(index, LONG.stored(0, FULL))
    assert memory(index) > 40 * MANY
    apply(index, LONG.removed(0, ENDS))
    assert memory(index) < EMPTY


def test_a_block_that_comes_and_goes_is_remembered_once() -> None:
    """Each time it goes its place is remembered, and forgotten when it comes again."""
    index, short = created(), Prefix(tokens(160))
    rounds = [short.stored(0, FULL), short.removed(0, range(16, 161, 16))] * 100
    for _ in range(20):
        apply(index, *rounds)
    assert memory(index) < EMPTY


def test_runs_that_found_their_parents_leave_nothing_in_the_order_of_waiting() -> None:
    """Events out of order are everyday's business."""
    index, short = created(forgotten=0), Prefix(tokens(32))
    child, parent = short.stored(0, FULL, 16), short.stored(0, FULL, 0, 16)
    rounds = [child, parent, short.removed(0, [16, 32])] * 200
    for _ in range(50):
        apply(index, *rounds)
    assert memory(index) < EMPTY


def on_cpu(event: BlockStored) -> BlockStored:
    return BlockStored(event.block_hashes, None, [], "CPU", group_idx=0, block_size=0)


def test_a_tier_that_removes_keeps_no_order_of_arrival() -> None:
    """Only of a tier that never removes is the oldest dropped; all others would pile it up."""
    index, short = created(), Prefix(tokens(160))
    stored = on_cpu(short.stored(0, FULL))
    rounds = [stored, short.removed(0, range(32, 161, 16), "CPU")] * 100
    for _ in range(20):
        apply(index, *rounds)
    assert memory(index) < EMPTY


def test_the_first_removal_of_a_tier_gives_its_order_of_arrival_back() -> None:
    """Until then it may be storage that others share."""
    index = created(forgotten=0)
    apply(index, on_cpu(LONG.stored(0, FULL)))
    before = memory(index)
    apply(index, LONG.removed(0, [16], "CPU"))
    assert memory(index) < before - 8 * (MANY - 1)


def test_a_fleet_that_is_cleared_again_and_again_leaves_few_slots_behind() -> None:
    """What a large clear leaves is taken away later; where too much is left, the clear does it
    itself."""
    index, short = created(cleared_at_once=2), Prefix(tokens(160))
    for _ in range(600):
        apply(index, short.stored(0, FULL), AllBlocksCleared())
    apply(index, short.stored(0, FULL))
    slots = getattr(index, "_slots")  # noqa: B009 - of the compiled index alone
    assert max(slots.values()) <= 256
    assert blocks_held(index, SOURCE) == 10
    assert memory(index) < EMPTY
