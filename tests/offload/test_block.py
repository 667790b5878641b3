"""The order in which blocks are given out again."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from offload.block import Block, FreeQueue
from tests.offload.small_cache import ids


def blocks(count: int) -> list[Block]:
    return [Block(index) for index in range(count)]


def test_a_new_queue_gives_its_blocks_out_in_their_order() -> None:
    """A pool's first blocks lie side by side in memory."""
    queue = FreeQueue(blocks(4))
    assert ids(queue.blocks()) == [0, 1, 2, 3]
    assert ids(queue.pop(3)) == [0, 1, 2]
    assert ids(queue.pop(1)) == [3]
    assert len(queue) == 0


def test_an_empty_queue_takes_and_gives_nothing() -> None:
    """A pool may be given out down to the last block."""
    queue = FreeQueue([])
    assert queue.pop(0) == []
    queue.append([])
    queue.prepend([])
    assert (len(queue), queue.blocks()) == (0, [])


def test_appended_blocks_go_last_and_prepended_ones_next_each_in_their_order() -> None:
    """Cached blocks are kept as long as possible, those without a hash are reused at once."""
    everything = blocks(6)
    queue = FreeQueue(everything[:2])
    queue.append(everything[2:4])
    queue.prepend(everything[4:6])
    assert ids(queue.blocks()) == [4, 5, 0, 1, 2, 3]


def test_a_block_leaves_from_anywhere_and_comes_back() -> None:
    """A hit takes its blocks out of the middle of the queue."""
    everything = blocks(4)
    queue = FreeQueue(everything)
    for index in (1, 3, 0):
        queue.remove(everything[index])
    assert ids(queue.blocks()) == [2]
    queue.remove(everything[2])
    assert (len(queue), queue.blocks()) == (0, [])
    queue.append([everything[1], everything[2]])
    assert ids(queue.blocks()) == [1, 2]


def test_a_removal_touches_the_neighbours_and_nothing_else() -> None:
    """A hit of thousands of blocks would stop the engine if each were searched for."""
    everything = blocks(100)
    queue = FreeQueue(everything)
    links = {block.block_id: (block.previous_free, block.next_free) for block in everything}
    queue.remove(everything[50])
    changed = [
        block.block_id
        for block in everything
        if links[block.block_id] != (block.previous_free, block.next_free)
    ]
    assert changed == [49, 50, 51]
    assert (everything[50].previous_free, everything[50].next_free) == (None, None)


def test_a_block_that_was_given_out_has_no_neighbours() -> None:
    """A stale link would tie it to blocks that belong to other requests by now."""
    queue = FreeQueue(blocks(3))
    assert {(block.previous_free, block.next_free) for block in queue.pop(3)} == {(None, None)}


@given(st.data(), st.integers(0, 12))
def test_the_queue_does_what_a_plain_list_does(data: st.DataObject, count: int) -> None:
    """Every order of operations is compared with a form that is obviously right."""
    everything = blocks(12)
    queue, expected = FreeQueue(everything[:count]), everything[:count]
    for step in data.draw(
        st.lists(st.sampled_from(["pop", "remove", "append", "prepend"]), max_size=25)
    ):
        outside = [block for block in everything if block not in expected]
        if step == "pop":
            taken = data.draw(st.integers(0, len(expected)))
            assert queue.pop(taken) == expected[:taken]
            expected = expected[taken:]
        elif step == "remove" and expected:
            queue.remove(expected.pop(data.draw(st.integers(0, len(expected) - 1))))
        elif outside:
            chosen = data.draw(st.lists(st.sampled_from(outside), unique=True))
            getattr(queue, step if step != "remove" else "append")(chosen)
            expected = chosen + expected if step == "prepend" else expected + chosen
        assert queue.blocks() == expected
        assert len(queue) == len(expected)


def test_a_block_shows_itself_without_its_hash() -> None:
    """A representation ends up in logs, and a hash identifies a prompt."""
    block = Block(7)
    assert repr(block) == "Block(7, ref_count=0, cached=False)"
    block.block_hash, block.ref_count = b"secret", 2
    assert repr(block) == "Block(7, ref_count=2, cached=True)"
