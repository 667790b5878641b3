"""More sources than a word of the compiled index has bits, and several layouts that are looked up
together. Prompts are longer than the piece after which a look-up may end."""

from __future__ import annotations

import pytest

from kvevents.layout import GroupKind, KVCacheGroup
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints
from tests.router.index.implementations import Implementation
from tests.support.blocks import FULL, Prefix, apply, tokens, window
from tests.support.index import match_source

PROMPT = Prefix(tokens(640))
COARSE = KVCacheGroup(GroupKind.FULL, 32)
CHUNKED = KVCacheGroup(GroupKind.CHUNKED_LOCAL, 16, attention_chunk_size=64)
COUNT = 130


def sources(index: PrefixIndex, *hints: LayoutHints) -> list[SourceId]:
    """As many as need three words, with *hints* in turn."""
    added = [SourceId(f"replica-{number}") for number in range(COUNT)]
    for number, source in enumerate(added):
        index.add(source, hints[number % len(hints)])
    return added


def known(*groups: KVCacheGroup, eagle: bool | tuple[int, ...] = False) -> LayoutHints:
    return LayoutHints(groups, 16, eagle=eagle, authoritative=True, hash_seeds=())


def hits(index: PrefixIndex) -> dict[SourceId, int]:
    """All together, each of which must be its hit alone."""
    asked = [*PROMPT.tokens, 1]
    together = {source: hit.cached_tokens for source, hit in index.match(asked).items()}
    prompt = index.prepare(asked)
    alone = {source: match_source(index, prompt, source).cached_tokens for source in together}
    assert together == alone
    return together


@pytest.mark.parametrize("eagle", [False, True], ids=["plain", "drafting"])
@pytest.mark.parametrize(("hiding", "finding"), [(64, 0), (0, 64), (129, 1), (65, 66)])
def test_a_hash_that_one_source_does_not_find_is_found_by_another_of_another_word(
    implementation: Implementation, hiding: int, finding: int, eagle: bool
) -> None:
    """Two hashes of one prefix hide each other only within a source: each word has its own."""
    index = implementation.create(None)
    added = sources(index, known(FULL, eagle=eagle))
    newer = Prefix(PROMPT.tokens, seed="and a hidden salt")
    for number in (hiding, finding):
        apply(index, PROMPT.stored(0, FULL), source=added[number])
    apply(index, newer.stored(0, FULL), newer.removed(0, [640]), source=added[hiding])
    found = hits(index)
    longest = 624 if eagle else 640
    assert (found[added[finding]], found[added[hiding]]) == (longest, longest - 16)
    assert sum(tokens > 0 for tokens in found.values()) == 2
    implementation.expect_sound(index)


def test_sources_that_draft_with_other_groups_do_not_end_each_others_look_up(
    implementation: Implementation,
) -> None:
    """A source leaves where its own full attention ends, not where another's lacks a block."""
    index = implementation.create(None)
    first, second = known(FULL, eagle=True), known(window(17), FULL, eagle=True)
    added = sources(index, first, second)
    for number, source in enumerate(added):
        if number % 2 == 0:
            apply(index, PROMPT.stored(0, FULL), source=source)
            continue
        apply(index, PROMPT.stored(0, window(17)), PROMPT.stored(1, FULL), source=source)
        # Of a window only the end is left.
        apply(index, PROMPT.removed(0, range(16, 593, 16)), source=source)
    assert set(hits(index).values()) == {624}


def test_a_source_with_larger_blocks_is_not_left_behind_at_their_first_half(
    implementation: Implementation,
) -> None:
    """Blocks of 32 under hashes of 16 end at every second one."""
    index = implementation.create(None)
    added = sources(index, known(COARSE, CHUNKED))
    for source in added:
        apply(index, PROMPT.stored(0, COARSE), PROMPT.stored(1, CHUNKED), source=source)
    assert set(hits(index).values()) == {640}


def test_sources_with_blocks_of_two_sizes_in_one_group_are_followed_each_by_its_own(
    implementation: Implementation,
) -> None:
    """They are looked up together, since their hashes end at the same tokens."""
    index = implementation.create(None)
    added = sources(index, known(FULL, CHUNKED), known(COARSE, CHUNKED))
    for number, source in enumerate(added):
        full, end = (FULL, 32) if number % 2 == 0 else (COARSE, 640)
        apply(index, PROMPT.stored(0, full, 0, end), source=source)
        apply(index, PROMPT.stored(1, CHUNKED, 0, end), source=source)
    found = hits(index)
    assert [found[source] for source in added] == [32, 640] * (COUNT // 2)


def test_a_drafters_block_behind_the_end_of_full_attention_is_looked_up(
    implementation: Implementation,
) -> None:
    """The window of the drafter is asked one block further, here three hashes, than full attention
    holds: the look-up may not have ended."""
    index = implementation.create(None)
    added = sources(index, known(FULL, window(49, 48), eagle=(1,)))
    for source in added:
        apply(index, PROMPT.stored(0, FULL, 0, 96), PROMPT.stored(1, window(49, 48)), source=source)
    assert set(hits(index).values()) == {96}
