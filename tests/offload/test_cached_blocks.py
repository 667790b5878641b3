"""Hash -> block, where several requests may have computed the same prefix."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from offload.block import Block
from offload.cached_blocks import CachedBlocks

A, B = b"a", b"b"


def test_a_hash_is_found_while_it_has_a_copy() -> None:
    """A hit must exist, and what is gone must be a miss."""
    cached, block = CachedBlocks(), Block(1)
    assert (A in cached, cached.get(A), len(cached)) == (False, None, 0)
    assert cached.add(A, block)
    assert (A in cached, cached.get(A), len(cached), list(cached)) == (True, block, 1, [A])
    assert cached.discard(A, block)
    assert (A in cached, cached.get(A), len(cached)) == (False, None, 0)


def test_copies_of_one_hash_count_once_and_the_oldest_serves() -> None:
    """Other requests share the old copy already, so a hit occupies no second block."""
    cached, blocks = CachedBlocks(), [Block(index) for index in range(3)]
    assert [cached.add(A, block) for block in blocks] == [True, False, False]
    assert (len(cached), cached.get(A)) == (1, blocks[0])


def test_the_next_oldest_serves_when_the_oldest_goes() -> None:
    """The order must not depend on which copy is evicted."""
    cached, blocks = CachedBlocks(), [Block(index) for index in range(3)]
    for block in blocks:
        cached.add(A, block)
    assert not cached.discard(A, blocks[0])
    assert cached.get(A) is blocks[1]
    assert not cached.discard(A, blocks[2])
    assert cached.get(A) is blocks[1]
    assert cached.discard(A, blocks[1])
    assert A not in cached
    assert cached.add(A, blocks[2])


def test_clearing_forgets_every_copy() -> None:
    """A later copy that survived would come back as a hit when the next first copy goes."""
    cached = CachedBlocks()
    cached.add(A, Block(1))
    cached.add(A, Block(2))
    cached.add(B, Block(3))
    cached.clear()
    assert (len(cached), list(cached), cached.get(A)) == (0, [], None)
    block = Block(4)
    assert cached.add(A, block)
    assert cached.discard(A, block)


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 4)), max_size=40))
def test_any_order_of_copies_is_counted_right(toggles: list[tuple[bytes, int]]) -> None:
    """The results of `add` and `discard` become events:

    one wrong result, and a router stays wrong.
    """
    cached, blocks = CachedBlocks(), [Block(index) for index in range(5)]
    copies: dict[bytes, list[Block]] = {A: [], B: []}
    for block_hash, index in toggles:
        mine, block = copies[block_hash], blocks[index]
        if block in mine:
            mine.remove(block)
            assert cached.discard(block_hash, block) is (not mine)
        else:
            assert cached.add(block_hash, block) is (not mine)
            mine.append(block)
        assert {key: cached.get(key) for key in (A, B)} == {
            key: next(iter(copies[key]), None) for key in (A, B)
        }
        assert len(cached) == sum(bool(found) for found in copies.values())
