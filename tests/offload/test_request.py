"""A request's tokens and the hashes of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvevents.hashing import ExtraKeys
from offload.request import CacheRequest, RequestHasher
from tests.offload.small_cache import CHAIN, request


def chained(
    tokens: Sequence[int], extra_keys: Sequence[ExtraKeys] = (), size: int = 4
) -> list[bytes]:
    return list(CHAIN.block_hashes(tokens, size, extra_keys))


@pytest.mark.parametrize(("count", "hashes"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (12, 3)])
def test_a_block_has_a_hash_as_soon_as_it_is_full(count: int, hashes: int) -> None:
    """Half a block is nothing that another request could look up."""
    assert request("a", range(count)).block_hashes == chained(range(count))
    assert len(request("a", range(count)).block_hashes) == hashes


@given(st.lists(st.lists(st.integers(0, 9), max_size=7), max_size=6))
def test_output_is_hashed_as_if_it_had_been_prompt(pieces: list[list[int]]) -> None:
    """The next turn of a conversation has this turn's response in its prompt."""
    grown = request("a", [])
    for piece in pieces:
        grown.append(piece)
    everything = [token for piece in pieces for token in piece]
    assert grown.block_hashes == request("b", everything).block_hashes == chained(everything)
    assert (grown.token_ids, grown.num_tokens, grown.num_prompt_tokens) == (
        everything,
        len(everything),
        0,
    )


def test_a_prompts_length_stays_when_output_is_appended() -> None:
    """Sparse retention keeps blocks before the prompt's end."""
    grown = request("a", range(5))
    grown.append([1, 2])
    assert (grown.num_prompt_tokens, grown.num_tokens, grown.num_computed_tokens) == (5, 7, 0)


def test_the_callers_list_is_its_own() -> None:
    """A caller that reuses its buffer must not change cached blocks."""
    tokens = [1, 2, 3, 4]
    made = CacheRequest("a", tokens, RequestHasher(CHAIN, 4))
    made.append([5])
    tokens[0] = 9
    assert made.token_ids == [1, 2, 3, 4, 5]
    assert tokens == [9, 2, 3, 4]


def test_a_hash_covers_the_tokens_up_to_its_end_whatever_the_blocks_size() -> None:
    """Groups with larger blocks use every second, third ... hash of the same chain."""
    made = request("a", range(24))
    assert [made.hash_at(end) for end in (4, 8, 24)] == [
        made.block_hashes[0],
        made.block_hashes[1],
        made.block_hashes[5],
    ]


SQL = ("lora", "sql")


@pytest.mark.parametrize(
    ("settings", "reported", "hashed"),
    [
        ({}, [None, None, None], [None, None, None]),
        ({"lora_name": "sql"}, [("sql",)] * 3, [(SQL,)] * 3),
        ({"lora_name": ""}, [("",)] * 3, [(("lora", ""),)] * 3),
        (
            {"cache_salt": "pepper"},
            [("pepper",), None, None],
            [(("cache_salt", "pepper"),), None, None],
        ),
        ({"cache_salt": ""}, [None, None, None], [None, None, None]),
        (
            {"extra_keys": [None, (("image", 2),)]},
            [None, (("image", 2),), None],
            [None, (("mm", "image", 2),), None],
        ),
        (
            {"extra_keys": [None, (b"embeds",)]},
            [None, (b"embeds",), None],
            [None, (("prompt_embeds", b"embeds"),), None],
        ),
        (
            {
                "lora_name": "sql",
                "cache_salt": "pepper",
                "extra_keys": [(b"embeds", ("image", -1), ("sound", 3))],
            },
            [("sql", ("image", -1), ("sound", 3), "pepper", b"embeds"), ("sql",), ("sql",)],
            [
                (
                    SQL,
                    ("mm", "image", -1),
                    ("mm", "sound", 3),
                    ("cache_salt", "pepper"),
                    ("prompt_embeds", b"embeds"),
                ),
                (SQL,),
                (SQL,),
            ],
        ),
    ],
)
def test_what_else_decides_a_blocks_content_is_part_of_its_hash(
    settings: dict[str, Any], reported: list[ExtraKeys], hashed: list[ExtraKeys]
) -> None:
    """Another adapter, picture or tenant must never be served these blocks.

    Order and names of the kinds of keys are vLLM's.
    """
    made = request("a", range(12), **settings)
    assert [made.extra_keys_between(start, start + 4) for start in (0, 4, 8)] == reported
    assert made.block_hashes == chained(range(12), hashed)
    assert made.has_extra_keys is any(reported)
    made.append(range(12, 16))
    behind = None if made.lora_name is None else (("lora", made.lora_name),)
    assert made.block_hashes == chained(range(16), [*hashed, behind])


def test_a_salt_is_not_taken_for_an_adapter_of_its_name() -> None:
    """One is a tenant's secret, the other public.

    Guessing it must not give access to the tenant's blocks.
    """
    assert (
        request("a", range(4), lora_name="sql").block_hashes
        != request("b", range(4), cache_salt="sql").block_hashes
    )


def test_a_picture_counts_from_the_start_of_the_larger_block() -> None:
    """A group with blocks of two hash blocks reports a pair once, shifted by its position."""
    pictures: list[ExtraKeys] = [(("one", -3),), (("two", 1),), None, (("three", 2), b"digest")]
    made = request("a", range(16), lora_name="sql", cache_salt="pepper", extra_keys=pictures)
    assert made.extra_keys_between(0, 8) == ("sql", ("one", -3), ("two", 5), "pepper")
    assert made.extra_keys_between(8, 16) == ("sql", ("three", 6), b"digest")


def test_requests_that_differ_in_anything_share_no_hash() -> None:
    """Requests that do not differ share all hashes."""
    variants = [{}, {"lora_name": "sql"}, {"cache_salt": "pepper"}, {"extra_keys": [(b"digest",)]}]
    names = [request("a", range(12), **settings).block_hashes for settings in variants]  # type: ignore[arg-type]
    assert len({name for found in names for name in found}) == 12
    assert request("another", range(12)).block_hashes == names[0]
