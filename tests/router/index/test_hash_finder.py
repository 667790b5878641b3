"""Which hash function an engine uses: found where it can be, never guessed, given up in time."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvevents.events import BlockHash, BlockStored, CacheLayout, GroupSpec
from kvevents.hashing import DEFAULT_SEED, HashChain, hash_algorithms, to_wire_int
from router.index.hash_finder import HashFinder, HashForm, engine_hashes
from router.index.layout_learner import LayoutHints
from tests.support.blocks import Prefix, tokens


def finder(*seeds: str) -> HashFinder:
    return HashFinder(seeds or LayoutHints().hash_seeds)


def first_event(
    algorithm: str, seed: str, as_int: bool, kept: list[int] | None = None, lookahead: int = 0
) -> BlockStored:
    """The start of a prompt, as an engine with that hash function announces it; *kept* blocks, or
    all."""
    token_ids, size = tokens(64), 16
    chain = HashChain.from_seed(algorithm, seed)
    digests = list(chain.block_hashes([*token_ids, *range(lookahead)], size, lookahead=lookahead))
    names: list[BlockHash] = (
        [to_wire_int(digest) for digest in digests] if as_int else list(digests)
    )
    chosen = names if kept is None else [names[end // size - 1] for end in kept]
    behind = [
        [*token_ids, *range(lookahead)][end : end + lookahead]
        for end in (kept or range(16, 65, 16))
    ]
    return BlockStored(
        chosen,
        None,
        token_ids,
        "GPU",
        0,
        block_size=size,
        lookahead_token_ids=behind if lookahead else None,
    )


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("kept", [None, [64], [32, 48]], ids=["dense", "last", "holes"])
@pytest.mark.parametrize("as_int", [True, False], ids=["int", "bytes"])
@pytest.mark.parametrize("algorithm", hash_algorithms())
def test_every_known_function_is_found_from_an_event(
    algorithm: str, as_int: bool, kept: list[int] | None, lookahead: int
) -> None:
    """One event that starts a prompt is enough, dense or with holes, in either form."""
    found = finder()
    found.try_event(first_event(algorithm, "42", as_int, kept, lookahead), 16)
    if lookahead and kept == [32, 48]:
        assert found.chain in (None, HashChain.from_seed(algorithm, "42"))
    else:
        assert found.chain == HashChain.from_seed(algorithm, "42")
        assert not found.may_find


def test_a_function_is_found_from_a_prompt() -> None:
    """Blocks of a model without a dense group reveal nothing by themselves; the prompt that made
    them may be sent again."""
    found, prompt = finder(), Prefix(tokens(160), seed=DEFAULT_SEED)
    found.try_prompt(prompt.tokens, [[]], 16, 0, {prompt.hash_at(112)}.__contains__)
    assert found.chain == HashChain.from_seed()


def test_what_an_announcement_says_needs_no_search() -> None:
    """Ours names its function and the root of its chain."""
    found = finder()
    found.see_announcement(
        CacheLayout("p", [GroupSpec("full_attention", 16)], 16, 16, "sha256_cbor", b"root")
    )
    assert found.chain == HashChain("sha256_cbor", b"root")
    unknown = finder()
    unknown.see_announcement(
        CacheLayout("p", [GroupSpec("full_attention", 16)], 16, 16, "md5", b"root")
    )
    assert unknown.chain is None
    assert unknown.may_find


def test_a_seed_that_was_not_configured_is_not_found() -> None:
    """It is one of those given, or none."""
    event = first_event("sha256", "a secret", as_int=True)
    found = finder("0", "1")
    found.try_event(event, 16)
    assert found.chain is None
    known = finder("0", "a secret")
    known.try_event(event, 16)
    assert known.chain == HashChain.from_seed("sha256", "a secret")


@pytest.mark.parametrize(
    "change",
    [
        {"parent_block_hash": 5},
        {"lora_name": "sql"},
        {"extra_keys": [["tenant-a"], None, None, None]},
        {"block_hashes": []},
    ],
    ids=["behind a parent", "an adapter", "a salt", "no hashes"],
)
def test_an_event_whose_hashes_cover_more_than_is_shown_is_not_tried(
    change: dict[str, object],
) -> None:
    """It costs effort and proves nothing."""
    found = finder()
    found.try_event(replace(first_event("sha256", "0", as_int=True), **change), 16)
    assert (found.chain, found._effort) == (None, 0)


def test_one_right_hash_among_wrong_ones_proves_nothing() -> None:
    """In an event with holes every hash must be in the chain."""
    event = first_event("sha256", "0", as_int=True, kept=[32, 48])
    found = finder()
    found.try_event(replace(event, block_hashes=[event.block_hashes[0], 12345]), 16)
    assert found.chain is None


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.integers(0, 2**64 - 1) | st.binary(min_size=1, max_size=32), min_size=1, max_size=4
    ),
    st.booleans(),
)
def test_hashes_of_an_unknown_function_are_never_taken_for_a_known_ones(
    hashes: list[BlockHash], is_dense: bool
) -> None:
    """A wrong function finds nothing, or worse, other blocks."""
    size = 16 if is_dense else 4
    found = finder()
    found.try_event(
        BlockStored(hashes, None, tokens(len(hashes) * 16), "GPU", 0, block_size=size), 16
    )
    found.try_prompt(tokens(64), [[]], 16, 0, set(hashes).__contains__)
    assert found.chain is None


def test_the_search_ends_when_it_has_proved_useless() -> None:
    """An engine with a random seed must not cost the router a second of every minute."""
    found, rng = finder(), random.Random(1)
    events = 0
    while found.may_find:
        found.try_event(
            BlockStored([rng.getrandbits(64)], None, tokens(16, events), "GPU", 0, block_size=16),
            16,
        )
        events += 1
        assert events < 20_000
    assert events > 100
    assert found.chain is None


def test_a_search_over_wide_blocks_ends_as_soon() -> None:
    """What costs is the tokens that are hashed, and a publisher chooses how many are in a block."""
    found, wide, started = finder(), list(range(65_536)), time.process_time()
    while found.may_find and time.process_time() - started < 4:
        found.try_event(BlockStored([1], None, wide, "GPU", 0, block_size=len(wide)), len(wide))
    assert not found.may_find


def test_a_search_with_a_wide_lookahead_ends_as_soon() -> None:
    """A publisher also chooses how many tokens behind a block its hash is said to cover."""
    found, started = finder(), time.process_time()
    found.try_prompt(list(range(16_000)), [[]], 16, 8_000, {1}.__contains__)
    assert time.process_time() - started < 3


def test_an_event_that_is_too_long_to_try_is_left() -> None:
    """One event must not take the whole budget."""
    found = finder()
    length = (found.BLOCKS_PER_TRY + 1) * 16
    for _ in range(found.TOKENS_TO_HASH // length + 1):
        found.try_event(BlockStored([1], None, tokens(length), "GPU", 0, block_size=16), 16)
    assert found.may_find


@pytest.mark.parametrize("as_int", [True, False])
def test_a_prompts_hashes_have_the_form_the_engine_sends(as_int: bool) -> None:
    """They are looked up among those it sent."""
    chain, prompt = HashChain.from_seed("sha256", "0"), Prefix(tokens(64), seed="0", as_int=as_int)
    form = HashForm(chain, 16, as_int=as_int)
    assert engine_hashes(form, prompt.tokens) == prompt.hashes
