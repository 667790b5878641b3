"""Who used which part of a prefix last, against a plain model that asks every request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from tests.oracle.mirror.ownership import USE_KEYS, Ownership, Use

PATHS = [(1, 2, 3, 4), (1, 2, 3, 9), (1, 7), (1, 2), (8,), (8, 18, 19), (1, 2, 3, 4, 5, 6)]


def test_a_request_takes_what_it_shares_from_the_one_before() -> None:
    """The drawing in the module."""
    ownership = Ownership()
    uses = []
    for keys in ((1, 2, 3, 4, 5), (1, 2, 3, 6, 7), (1, 2, 8)):
        use, _ = ownership.begin(keys)
        ownership.end(use, now=len(uses))
        uses.append(use)
    assert [use.owned for use in uses] == [2, 3, 3]


def test_a_continued_prompt_leaves_nothing_to_the_one_it_continues() -> None:
    """Each turn of a conversation replaces the one before: one of them is remembered, not all."""
    ownership = Ownership()
    for turn in range(1, 50):
        use, taken = ownership.begin(range(turn))
        assert [each.keys for each in taken] == [turn - 1] * (turn > 1)
        ownership.end(use, now=turn)
    assert (ownership.requests, len(ownership)) == (1, 49)


def test_what_is_dropped_is_nobodys() -> None:
    """Evicted content that comes back belongs to the request that brought it back."""
    ownership = Ownership()
    first, _ = ownership.begin((1, 2, 3))
    ownership.end(first, 0)
    ownership.drop(first)
    _, taken = ownership.begin((1, 2, 3))
    assert taken == []
    assert len(ownership) == 3


def test_the_size_is_that_of_what_is_kept_for_ended_requests() -> None:
    """Memory is bounded by it: of a prompt all is kept as long as one key of it is owned."""
    ownership = Ownership()
    uses = []
    for keys in ((1, 2, 3, 4), (1, 2, 9), (1, 2, 9)):
        use, _ = ownership.begin(keys)
        uses.append(use)
        ownership.end(use, now=len(uses))
    assert ownership.size == (4 + USE_KEYS) + (3 + USE_KEYS)
    ownership.drop_end(uses[0], 1)
    assert ownership.size == (3 + USE_KEYS) + (3 + USE_KEYS)
    ownership.drop_end(uses[0], 1)
    assert ownership.size == 3 + USE_KEYS
    ownership.clear()
    assert ownership.size == 0


class _Reference:
    """Every request with all its keys, and when it used them last."""

    def __init__(self) -> None:
        self.moment = 0
        self.last: dict[int, Use] = {}
        self.ended: list[Use] = []

    def use(self, use: Use) -> None:
        self.last |= dict.fromkeys(use.keys, use)

    def leading(self, keys: Sequence[int]) -> int:
        return len(list(takewhile(self.last.__contains__, keys)))

    def owned(self, use: Use) -> set[int]:
        return {key for key, user in self.last.items() if user is use}


@given(
    st.lists(st.tuples(st.sampled_from(("begin", "end", "drop", "drop_end")), st.integers(0, 6)))
)
def test_ownership_is_that_of_the_last_user_of_every_key(steps: list[tuple[str, int]]) -> None:
    """The suffix and the order of the ends are all that is stored; both must be right whatever
    overlaps."""
    ownership, plain = Ownership(), _Reference()
    running: list[Use] = []
    for step, number in steps:
        if step == "begin":
            use, taken = ownership.begin(PATHS[number])
            assert sum(each.keys for each in taken) <= len(set(use.keys) & plain.last.keys())
            plain.use(use)
            running.append(use)
        elif step == "end" and running:
            use = running.pop(number % len(running))
            ownership.end(use, len(plain.ended))
            plain.use(use)
            plain.ended.append(use)
        elif step == "drop" and (oldest := ownership.oldest()) is not None:
            ownership.drop(oldest)
            plain.last = {key: use for key, use in plain.last.items() if use is not oldest}
        elif step == "drop_end" and (oldest := ownership.oldest()) is not None:
            for key in ownership.drop_end(oldest, number + 1):
                del plain.last[key]
        owning = [use for use in plain.ended if plain.owned(use)]
        assert list(ownership.ended()) == owning
        for use in owning:
            assert set(use.keys[use.owned_from :]) == plain.owned(use)
        assert len(ownership) == len(plain.last)
        assert all(ownership.leading(path) == plain.leading(path) for path in PATHS)


def test_only_what_ended_after_a_time_was_used_since() -> None:
    """How far a cache reaches is told by it: older uses would make every cache seem large."""
    ownership = Ownership()
    for moment, keys in enumerate(((1, 2, 3), (4, 5), (6,), (7, 8, 9, 10))):
        use, _ = ownership.begin(keys)
        ownership.end(use, float(moment))
    assert [ownership.owned_since(at, 100) for at in (-1.0, 0.0, 0.5, 1.0, 2.0, 3.0)] == [
        *(10, 7, 7, 5, 4, 0)
    ]
    assert [ownership.owned_since(-1.0, most) for most in (0, 3, 5, 9, 10)] == [0, 3, 5, 9, 10]
