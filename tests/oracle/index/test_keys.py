"""The router's own keys: what they depend on, and what they must not depend on."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.events import pack_tokens
from tests.oracle.index import keys as keys_module
from tests.oracle.index.keys import KeySpace, Mark, digest, joined, split, tokens_of
from tests.oracle.index.marks import marks_of

MODULUS = 0xFFFFFFFFFFFFFFC5
"""The largest prime below 2**64: keys of these tests are the same in every run."""

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=60)
sizes = st.lists(st.integers(1, 9), max_size=20)


@pytest.fixture
def space() -> KeySpace:
    return KeySpace(MODULUS)


def chain(
    space: KeySpace, token_ids: list[int], ends: list[int], marks: list[Mark] | None = None
) -> list[int]:
    """Keys of a prompt's prefixes."""
    return list(space.chain(space.root(None), pack_tokens(token_ids), ends, marks or []))


def cut(sizes: list[int], length: int) -> list[int]:
    """Ascending ends within a prompt."""
    return [end for end in accumulate(sizes) if end <= length]


# --- tokens ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(tokens, sizes)
def test_a_key_is_the_prefix_read_as_one_number(token_ids: list[int], steps: list[int]) -> None:
    """Against the definition: the root, then 32 bits a token, modulo the prime; the length stands
    above."""
    space = KeySpace(MODULUS)
    ends = cut(steps, len(token_ids))
    expected = []
    for end in ends:
        number = space.root(None)
        for token in token_ids[:end]:
            number = (number * 2**32 + token) % MODULUS
        expected.append(joined(end, number))
    assert chain(space, token_ids, ends) == expected


@settings(deadline=None)
@given(tokens, sizes, st.integers(0, 60), st.booleans())
def test_a_key_says_how_long_its_prefix_is(
    token_ids: list[int], steps: list[int], at: int, is_marked: bool
) -> None:
    """However many runs it was made of: that is where its block ends."""
    space, ends = KeySpace(MODULUS), cut(steps, len(token_ids))
    marks = [Mark(0, 5)] if is_marked else []
    before = list(space.chain(space.root(None), pack_tokens([9] * at), [at]))[-1]
    keys = list(space.chain(before, pack_tokens(token_ids), ends, marks))
    assert list(map(tokens_of, keys)) == [at + end for end in ends]
    assert [joined(*split(key)) for key in keys] == keys


@settings(deadline=None)
@given(tokens, sizes, sizes, st.integers(0, 60))
def test_a_prefix_has_one_key_however_it_is_split(
    token_ids: list[int], one: list[int], other: list[int], at: int
) -> None:
    """Engines announce it in runs and blocks of any size; prompts come whole."""
    space, length = KeySpace(MODULUS), len(token_ids)
    by_one = dict(zip(cut(one, length), chain(space, token_ids, cut(one, length)), strict=True))
    by_other = dict(
        zip(cut(other, length), chain(space, token_ids, cut(other, length)), strict=True)
    )
    assert all(by_one[end] == by_other[end] for end in by_one.keys() & by_other.keys())

    middle = min(at, length)
    (key,) = chain(space, token_ids, [middle]) if middle else [space.root(None)]
    (continued,) = space.chain(key, pack_tokens(token_ids[middle:]), [length - middle])
    assert [continued] == (chain(space, token_ids, [length]) if length else [key])


marked_prompts = st.integers(1, 40).flatmap(
    lambda length: st.tuples(
        st.lists(st.integers(0, 2**32 - 1), min_size=length, max_size=length),
        st.lists(
            st.builds(Mark, st.integers(0, length - 1), st.integers(0, 2**64 - 1)), max_size=4
        ).map(sorted),
        st.integers(1, length),
    )
)


@settings(deadline=None)
@given(marked_prompts, sizes)
def test_marks_too_may_come_in_any_split(
    prompt: tuple[list[int], list[Mark], int], steps: list[int]
) -> None:
    """A mark lies at a token, wherever the blocks around it begin."""
    (token_ids, marks, middle), space = prompt, KeySpace(MODULUS)
    length = len(token_ids)
    (whole,) = chain(space, token_ids, [length], marks)
    assert chain(space, token_ids, [*cut(steps, length - 1), length], marks)[-1] == whole

    (key,) = chain(
        space, token_ids[:middle], [middle], [mark for mark in marks if mark.position < middle]
    )
    behind = [
        Mark(mark.position - middle, mark.digest) for mark in marks if mark.position >= middle
    ]
    continued = list(space.chain(key, pack_tokens(token_ids[middle:]), [length - middle], behind))
    assert continued == [whole]


@pytest.mark.parametrize("position", [8, 9, 11])
def test_a_mark_changes_every_key_behind_it_and_none_before(space: KeySpace, position: int) -> None:
    """An image in the third block says nothing of the first two, also where it starts right behind
    them."""
    token_ids, ends = list(range(100, 116)), [4, 8, 12, 16]
    without, with_mark = (
        chain(space, token_ids, ends),
        chain(space, token_ids, ends, [Mark(position, 77)]),
    )
    assert with_mark[:2] == without[:2]
    assert not set(with_mark[2:]) & set(without)


@pytest.mark.parametrize("position", [0, 3, 4, 7])
def test_marks_at_different_tokens_give_different_keys(space: KeySpace, position: int) -> None:
    """The same image one token later is another prompt."""
    keys = {at: chain(space, list(range(8)), [8], [Mark(at, 5)])[0] for at in range(8)}
    assert [at for at, key in keys.items() if key == keys[position]] == [position]


@pytest.mark.parametrize("salt", ["tenant-a", "b"])
def test_tokens_cannot_imitate_a_mark(space: KeySpace, salt: str) -> None:
    """Whoever knows a salt can compute its digest; two tokens that spell it must not lead to the
    salted prompt's key."""
    high, low = divmod(digest(salt), 2**32)
    (salted,) = chain(space, [5, 6], [2], marks_of(None, 2, cache_salt=salt))
    (imitated,) = chain(space, [high, low, 5, 6], [4])
    assert imitated != salted


def test_different_prefixes_have_different_keys() -> None:
    """A thousand prompts of one block, and every prefix of a long one, under a secret
    modulus."""
    space, rng = KeySpace(), random.Random(3)
    prompts = {tuple(rng.choices(range(2000), k=16)) for _ in range(1000)}
    assert len({chain(space, list(prompt), [16])[0] for prompt in prompts}) == len(prompts)
    assert len(set(chain(space, [0] * 500, list(range(1, 501))))) == 500


def test_two_spaces_have_nothing_to_do_with_each_other() -> None:
    """An outsider cannot craft two prompts with one key without knowing the prime."""
    one, other = KeySpace(), KeySpace()
    assert one.modulus != other.modulus
    assert chain(one, [1, 2, 3], [3]) != chain(other, [1, 2, 3], [3])


def test_an_adapter_changes_the_root(space: KeySpace) -> None:
    """The same tokens through other weights are other keys and values."""
    assert len({space.root(None), space.root("sql"), space.root("chat")}) == 3
    assert space.root("sql") == space.root("sql")


def test_digests_tell_values_and_types_apart() -> None:
    """An adapter `1` is not the number 1."""
    values = ["a", "b", b"a", 1, "1", ["a"], ["a", 1], None, ""]
    assert len({digest(value) for value in values}) == len(values)
    assert all(0 <= digest(value) < 2**64 for value in values)


# --- the modulus ----------------------------------------------------------------------------------


def test_the_modulus_is_a_prime_between_2_63_and_2_64() -> None:
    """By Fermat's test to bases of its own choosing, which no composite of this size passes by
    chance."""
    rng = random.Random(5)
    moduli = [KeySpace().modulus for _ in range(20)]
    assert len(set(moduli)) == 20
    for modulus in moduli:
        assert 2**63 <= modulus < 2**64
        assert all(pow(rng.randrange(2, modulus), modulus - 1, modulus) == 1 for _ in range(30))
        assert all(modulus % small for small in range(2, 2000))


def test_primality_is_decided_right() -> None:
    """Every number up to 20,000 by trial division; composites that fool weaker tests; primes near
    the top."""
    for number in range(41, 20_000, 2):
        assert keys_module._is_prime(number) == all(
            number % small for small in range(3, int(number**0.5) + 1, 2)
        )
    fooling = [
        561,
        1729,
        3215031751,
        341550071728321,
        3825123056546413051,
        (2**31 - 1) ** 2,
        4294967291 * 4294967279,
    ]
    assert not any(map(keys_module._is_prime, fooling))
    assert all(map(keys_module._is_prime, [2**61 - 1, MODULUS, 2**63 + 29, 9223372036854775783]))
