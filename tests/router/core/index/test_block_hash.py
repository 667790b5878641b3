"""The compiled index hashes blocks as `kvevents.hashing` does, which real engines confirm."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvevents.hashing import HashChain, hash_algorithms
from router import _core as core
from router.index import prompt as native

SALT = "salt" * 3
names = st.text(max_size=12) | st.just(SALT)
items = (
    names
    | st.binary(max_size=12)
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.tuples(st.just("mm"), names, st.integers(-(2**31), 2**31))
)
extra_keys = st.lists(
    st.none() | st.lists(items, min_size=1, max_size=5).map(tuple), max_size=6
)  # the same object may appear twice, as in what vLLM hashes
tokens = st.lists(
    st.integers(0, 2**32 - 1)
    | st.sampled_from([0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31]),
    max_size=60,
)


def in_core(
    chain: HashChain, token_ids: list[int], size: int, extra: list[Any], lookahead: int
) -> list[bytes] | None:
    """The digests that the compiled index makes."""
    written = native.written_extra_keys(chain.algorithm, extra)
    prompt = core.Prompt(token_ids, None, None, b"")
    found = core.block_hashes(prompt, chain.algorithm, chain.none_hash, size, lookahead, written)
    if found is None:
        return None
    length = 32 if chain.algorithm.startswith("sha256") else 16
    return [found[at : at + length] for at in range(0, len(found), length)]


@pytest.mark.parametrize("algorithm", hash_algorithms())
@settings(deadline=None, max_examples=150)
@given(token_ids=tokens, size=st.integers(1, 20), extra=extra_keys, lookahead=st.integers(0, 4))
@example(token_ids=[], size=1, extra=[], lookahead=0)
@example(token_ids=[1, 2, 3], size=3, extra=[(SALT, SALT)], lookahead=0)
@example(token_ids=[1, 2, 3], size=1, extra=[(("mm", SALT, 1), ("mm", SALT, 2))], lookahead=2)
def test_a_chain_is_that_of_the_reference(
    algorithm: str, token_ids: list[int], size: int, extra: list[Any], lookahead: int
) -> None:
    """A digest that differs in one bit finds no block."""
    chain = HashChain.from_seed(algorithm)
    expected = list(chain.block_hashes(token_ids, size, extra, lookahead))
    assert in_core(chain, token_ids, size, extra, lookahead) == expected


@pytest.mark.parametrize("algorithm", hash_algorithms())
@pytest.mark.parametrize("size", [16, 64, 100, 1056, 4000, 12_000])
def test_blocks_of_every_size_are_hashed_alike(algorithm: str, size: int) -> None:
    """XXH3 takes short, middle and long messages apart, and SHA-256 fills blocks of 64 bytes."""
    chain = HashChain.from_seed(algorithm, "0")
    token_ids = [place * 2_654_435_761 % 151_936 for place in range(size * 2 + 7)]
    assert in_core(chain, token_ids, size, [], 0) == list(chain.block_hashes(token_ids, size))


@pytest.mark.parametrize("extra", [[], [(b"x" * 70_000,)]], ids=["tokens", "extra keys"])
def test_what_pickle_writes_in_several_frames_is_left_to_python(extra: list[Any]) -> None:
    """The bytes between frames are Python's own affair."""
    chain = HashChain.from_seed("sha256")
    assert (
        in_core(chain, [70_000] * (16 if extra else 14_000), 16 if extra else 14_000, extra, 0)
        is None
    )


def test_a_root_of_another_length_is_left_to_python() -> None:
    """A publisher may announce any bytes."""
    assert in_core(HashChain("sha256", b"short"), [1, 2], 1, [], 0) is None
