"""Block hashes against independent serialisers, and against hashes that real engines
published."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cbor2
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.codec import decode
from kvevents.errors import HashAlgorithmError
from kvevents.events import BlockStored
from kvevents.hashing import DEFAULT_SEED, HashChain, encode_cbor, hash_algorithms, to_wire_int
from router.cli.recordings import Query, RecordingReader

STREAMS = Path(__file__).parent.parent / "conformance" / "streams"

DIGESTS: dict[str, Callable[[Any], bytes]] = {
    "sha256": lambda value: hashlib.sha256(
        pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    ).digest(),
    "sha256_cbor": lambda value: hashlib.sha256(cbor2.dumps(value, canonical=True)).digest(),
    "xxhash": lambda value: xxhash.xxh3_128(
        pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    ).digest(),
    "xxhash_cbor": lambda value: xxhash.xxh3_128(cbor2.dumps(value, canonical=True)).digest(),
}
"""The same functions, written without ours."""

names = st.text(max_size=12)
extra_items = (
    names
    | st.binary(max_size=12)
    | st.tuples(names, st.integers(-(2**31), 2**31))
    | st.tuples(names, names)
)
extra_keys = st.none() | st.lists(extra_items, min_size=1, max_size=3).map(tuple)
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


# --- against an independent computation -----------------------------------------------------------


@pytest.mark.parametrize("algorithm", DIGESTS)
@settings(deadline=None, max_examples=60)
@given(
    seed=names, tokens=token_lists, size=st.integers(1, 8), extra=st.lists(extra_keys, max_size=5)
)
def test_a_chain_equals_one_computed_with_other_serialisers(
    algorithm: str, seed: str, tokens: list[int], size: int, extra: list[Any]
) -> None:
    """A hash that differs in one bit finds nothing."""
    digest = DIGESTS[algorithm]
    expected, parent = [], digest(seed)
    for index in range(len(tokens) // size):
        keys = extra[index] if index < len(extra) else None
        parent = digest((parent, tuple(tokens[index * size : (index + 1) * size]), keys))
        expected.append(parent)
    assert list(HashChain.from_seed(algorithm, seed).block_hashes(tokens, size, extra)) == expected


@settings(deadline=None, max_examples=60)
@given(
    tokens=token_lists,
    size=st.integers(1, 4),
    lookahead=st.integers(1, 5),
    extra=st.lists(extra_keys, max_size=5),
)
def test_a_hash_may_cover_the_next_tokens_too(
    tokens: list[int], size: int, lookahead: int, extra: list[Any]
) -> None:
    """With speculative decoding (vLLM >= 0.33) a block is hashed once the tokens behind it are
    known."""
    digest, parent, expected = DIGESTS["sha256"], DIGESTS["sha256"](DEFAULT_SEED), []
    for index, start in enumerate(range(0, len(tokens), size)):
        end = start + size
        if end + lookahead <= len(tokens):
            keys = extra[index] if index < len(extra) else None
            parent = digest(
                (parent, tuple(tokens[start:end]), (keys, *tokens[end : end + lookahead]))
            )
            expected.append(parent)
    assert list(HashChain.from_seed().block_hashes(tokens, size, extra, lookahead)) == expected


@pytest.mark.parametrize("algorithm", DIGESTS)
def test_a_single_block_is_hashed_as_in_the_chain(algorithm: str) -> None:
    """An engine hashes one block at a time."""
    chain = HashChain.from_seed(algorithm, "7")
    first, second = chain.block_hashes([1, 2, 3, 4], 2, [("salt",), None])
    assert chain.block_hash(None, [1, 2], ("salt",)) == first
    assert chain.block_hash(first, [3, 4]) == second


cbor_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64 - 1)
    | st.sampled_from(
        [
            0,
            23,
            24,
            255,
            256,
            65535,
            65536,
            2**32 - 1,
            2**32,
            2**64 - 1,
            -1,
            -24,
            -25,
            -256,
            -257,
            -(2**64),
        ]
    )
    | st.text(max_size=30)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(cbor_values)
def test_cbor_is_the_canonical_one(value: Any) -> None:
    """The bytes that go into the digest are those of the standard's canonical form, every head at
    its shortest."""
    assert encode_cbor(value) == cbor2.dumps(value, canonical=True)


@pytest.mark.parametrize("count", [23, 24, 255, 256, 65535, 65536])
def test_cbor_heads_change_their_size_where_the_standard_says(count: int) -> None:
    """Blocks of 16 to 1,024 tokens cross two of these."""
    for value in ([0] * count, "x" * count, b"x" * count):
        assert encode_cbor(value) == cbor2.dumps(value, canonical=True)


@pytest.mark.parametrize(
    "value", [1.5, {"a": 1}, {1}, object()], ids=lambda value: type(value).__name__
)
def test_cbor_refuses_types_that_no_block_hash_covers(value: Any) -> None:
    """A value written in another form than the engine's would silently give a wrong hash."""
    with pytest.raises(TypeError, match=type(value).__name__):
        encode_cbor([value])


@pytest.mark.parametrize("value", [2**64, -(2**64) - 1])
def test_cbor_refuses_integers_over_64_bits(value: int) -> None:
    """The standard writes those in another form."""
    with pytest.raises(OverflowError, match="64 bits"):
        encode_cbor(value)


# --- against hashes from real engines -------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "algorithm", "seed", "form", "is_tagged"),
    [
        ("sparse_swa_only.1", "sha256", DEFAULT_SEED, bytes, True),
        ("full_16.1", "sha256", DEFAULT_SEED, bytes, True),
        ("cbor_hash.1", "sha256_cbor", DEFAULT_SEED, bytes, True),
        ("real_full", "sha256", "0", int, True),
        ("real_v0230_gemma3_oracle", "sha256", "0", int, False),
        ("real_full_bytes_cbor", "sha256_cbor", "0", bytes, True),
    ],
)
def test_a_recorded_engines_hashes_are_computed(
    stream: str, algorithm: str, seed: str, form: type, is_tagged: bool
) -> None:
    """Seed, serialiser, digest, salts and wire form are the engine's own: whole chains, for every
    start of a prompt."""
    chain, blocks = HashChain.from_seed(algorithm, seed), 0
    for event in _from_the_root(stream):
        salts = [_salt(entry, is_tagged) for entry in event.extra_keys or ()]
        digests = list(chain.block_hashes(event.token_ids, 16, salts))
        known = set(digests) if form is bytes else set(map(to_wire_int, digests))
        assert set(event.block_hashes) <= known
        blocks += len(event.block_hashes)
    assert blocks > 20


def _from_the_root(stream: str) -> Iterator[BlockStored]:
    """The events that start a prompt."""
    with RecordingReader(STREAMS / f"{stream}.jsonl.gz") as reader:
        for record in reader:
            events = () if isinstance(record, Query) else decode(record).events
            for event in events:
                if (
                    isinstance(event, BlockStored)
                    and event.token_ids
                    and event.parent_block_hash is None
                ):
                    yield event


def _salt(entry: list[str] | None, is_tagged: bool) -> tuple[Any, ...] | None:
    """What vLLM hashes for a salt: from 0.31 on after a tag for its source."""
    return tuple(("cache_salt", salt) if is_tagged else salt for salt in entry) if entry else None


BLOCK = [691, 263, 501, 1585, 1939, 1104, 1974, 1164, 1251, 1658, 1523, 90, 1639, 473, 1848, 858]
OTHER = [90, 106, 36, 1382, 1990, 1911, 1842, 173, 1691, 141, 1316, 1630, 1613, 1702, 363, 93]
THIRD = [605, 1154, 357, 715, 1889, 311, 323, 87, 52, 1468, 1931, 1441, 1133, 1348, 143, 1903]
FOURTH = [36, 1332, 1780, 1448, 429, 1356, 1043, 1559, 607, 33, 1493, 931, 1997, 1719, 13, 876]


@pytest.mark.parametrize(
    ("algorithm", "tokens", "published"),
    [
        ("xxhash", BLOCK, 16695326501249308313),
        ("xxhash", OTHER, bytes.fromhex("a25e85a16576340f48ec0b4fc7ee6d98")),
        ("xxhash_cbor", THIRD, bytes.fromhex("ad97b0b9ff8e832d53731487597f9d60")),
        ("xxhash_cbor", FOURTH, 2423884909109042679),
    ],
)
def test_first_blocks_of_an_engine_with_seed_0_and_xxhash(
    algorithm: str, tokens: list[int], published: int | bytes
) -> None:
    """vLLM 0.33 published these; no recording kept here uses the xxhash family."""
    digest = HashChain.from_seed(algorithm, "0").block_hash(None, tokens)
    assert published in (digest, to_wire_int(digest))


def test_a_salted_block_of_a_new_engine_is_tagged_in_its_hash() -> None:
    """From vLLM 0.31 a salt is hashed as `("cache_salt", salt)`, while the event still shows the
    bare value."""
    tokens = [
        29,
        1478,
        660,
        45,
        1928,
        1798,
        1390,
        1130,
        897,
        1376,
        1561,
        1834,
        1511,
        182,
        1557,
        767,
    ]
    digest = HashChain.from_seed().block_hash(None, tokens, (("cache_salt", "tenant-a"),))
    assert to_wire_int(digest) == 11899850968005823283


def test_a_block_with_an_image_is_tagged_in_its_hash() -> None:
    """`("mm", identifier, offset)`, the offset counted from the block's first token."""
    digest = HashChain.from_seed().block_hash(None, [1793, *[9] * 15], (("mm", "img-1", 1),))
    assert to_wire_int(digest) == 3375324799597080506


def test_blocks_of_an_engine_with_speculative_decoding_cover_the_next_tokens() -> None:
    """vLLM 0.33 published these with three draft tokens; the second hash needs the first one's
    whole input."""
    tokens = [
        118,
        786,
        1869,
        1098,
        467,
        1962,
        1431,
        1808,
        1371,
        845,
        562,
        1778,
        478,
        456,
        452,
        1947,
    ]
    tokens += [
        1263,
        406,
        692,
        73,
        378,
        583,
        534,
        1094,
        1592,
        966,
        1903,
        548,
        279,
        790,
        380,
        190,
        1527,
        606,
        10,
    ]
    digests = HashChain.from_seed().block_hashes(tokens, 16, lookahead=3)
    assert [to_wire_int(digest) for digest in digests] == [
        3647316765022681427,
        14198751578088964532,
    ]


# --- seeds and forms ------------------------------------------------------------------------------


def test_the_wire_integer_is_the_digests_low_64_bits() -> None:
    """Big endian, unsigned: Python's own reading of the last eight bytes."""
    assert to_wire_int(bytes(range(32))) == 0x18191A1B1C1D1E1F
    assert to_wire_int(b"\xff" * 16) == 2**64 - 1


def test_chains_with_different_seeds_share_nothing() -> None:
    """Replicas with different seeds publish different names for the same block."""
    one, other = HashChain.from_seed(seed="0"), HashChain.from_seed(seed="1")
    assert not set(one.block_hashes(BLOCK, 4)) & set(other.block_hashes(BLOCK, 4))


def test_only_whole_blocks_are_hashed() -> None:
    """A block that is not full is not cached."""
    assert len(list(HashChain.from_seed().block_hashes(BLOCK[:15], 4))) == 3
    assert list(HashChain.from_seed().block_hashes(BLOCK[:3], 4)) == []
    assert len(list(HashChain.from_seed().block_hashes(BLOCK, 4, lookahead=1))) == 3


# --- algorithms that are not there ----------------------------------------------------------------


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    """The name comes from a configuration or from the wire."""
    with pytest.raises(
        HashAlgorithmError, match="'md5' must be one of sha256, sha256_cbor, xxhash, xxhash_cbor"
    ):
        HashChain.from_seed("md5")
    with pytest.raises(HashAlgorithmError, match="'blake'"):
        HashChain("blake", b"root").block_hash(None, [1])
    with pytest.raises(HashAlgorithmError) as caught:
        HashChain.from_seed("x" * 1000)
    assert len(str(caught.value)) < 200


def test_every_algorithm_of_vllm_is_available() -> None:
    """With the packages of this installation."""
    assert set(hash_algorithms()) == set(DIGESTS)


def test_without_its_package_the_xxhash_family_is_missing_and_the_error_says_what_to_install() -> (
    None
):
    """kvevents needs the package only for engines that chose the algorithm."""
    code = (
        "import sys; sys.modules['xxhash'] = None\n"
        "from kvevents.hashing import HashChain, hash_algorithms\n"
        "print(*hash_algorithms(), HashChain.from_seed('sha256').none_hash.hex())\n"
        "HashChain.from_seed('xxhash')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [
        "sha256",
        "sha256_cbor",
        HashChain.from_seed("sha256").none_hash.hex(),
    ]
    assert done.returncode == 1
    assert (
        "HashAlgorithmError: hash algorithm 'xxhash' must be one of sha256, sha256_cbor"
        in done.stderr
    )
    assert "install the package xxhash" in done.stderr
