"""The memory of recent prompts: the longest leading run, exactly as long as it counts, in bounded
memory."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router._core import Books
from router.index.base import SourceId
from router.routing.recent_prefixes import RecentPrefixes

STEP = 16
A, B, C = map(SourceId, "abc")


def found(recent: RecentPrefixes, keys: list[int], now: float) -> dict[SourceId, int]:
    """By cache, where there is something."""
    tokens = {
        source: recent.match(source, keys, STEP, now) for source in (A, SourceId("a", 1), B, C)
    }
    return {source: count for source, count in tokens.items() if count}


def chain(*tokens: str) -> list[int]:
    """Keys as a key space makes them: each stands for everything up to it."""
    return [hash(tokens[: end + 1]) % 2**61 for end in range(len(tokens))]


def test_a_prompt_is_found_where_it_was_sent() -> None:
    """The second of two equal prompts must know where the first one went."""
    recent = RecentPrefixes(Books(), ttl_s=5)
    before = recent.statistics()
    assert set(astuple(before)) == {0}
    recent.remember(A, chain("x", "y", "z"), now=0)
    assert found(recent, chain("x", "y", "z"), 1) == {A: 48}


def test_only_the_common_beginning_counts() -> None:
    """Conversations share their system prompt and nothing else."""
    recent = RecentPrefixes(Books(), ttl_s=5)
    recent.remember(A, chain("x", "y", "z"), now=0)
    recent.remember(B, chain("x"), now=0)
    assert found(recent, chain("x", "y", "other", "z"), 1) == {A: 32, B: 16}
    assert found(recent, chain("other", "y", "z"), 1) == {}
    assert found(recent, [], 1) == {}


def test_an_entry_counts_until_its_time_is_over_and_no_longer() -> None:
    """By then the events have arrived; a prediction that outlives them would hide evictions."""
    recent = RecentPrefixes(Books(), ttl_s=5)
    recent.remember(A, chain("x"), now=10)
    assert found(recent, chain("x"), 14.999) == {A: 16}
    assert found(recent, chain("x"), 15) == {}


def test_sending_again_prolongs() -> None:
    """A steady stream of equal prompts must not fall apart every few seconds."""
    recent = RecentPrefixes(Books(), ttl_s=5)
    for now in range(0, 40, 4):
        assert found(recent, chain("x"), now) == ({A: 16} if now else {})
        recent.remember(A, chain("x"), now)


def test_a_shorter_prompt_does_not_shorten_what_is_remembered() -> None:
    """Both were sent; the longer one's blocks are still being computed."""
    recent = RecentPrefixes(Books(), ttl_s=5)
    recent.remember(A, chain("x", "y"), now=0)
    recent.remember(A, chain("x"), now=3)
    assert found(recent, chain("x", "y"), 4) == {A: 32}
    assert found(recent, chain("x", "y"), 6) == {A: 16}


def test_a_forgotten_replica_has_nothing() -> None:
    """After a restart its cache is empty, whatever was sent there before."""
    recent = RecentPrefixes(Books(), ttl_s=5)
    recent.remember(A, chain("x"), now=0)
    recent.remember(B, chain("x"), now=0)
    found(recent, chain("x"), 5)  # one generation on
    recent.remember(A, chain("x"), now=5)
    recent.forget("a")
    recent.forget("never heard of")
    assert found(recent, chain("x"), 6) == {}
    assert recent.statistics().entries == 1


def test_the_ranks_of_a_replica_are_remembered_apart_and_forgotten_together() -> None:
    """Each has a cache of its own, and all of them go down with the replica."""
    recent = RecentPrefixes(Books(), ttl_s=5)
    first, second = SourceId("a", 0), SourceId("a", 1)
    recent.remember(first, chain("x", "y"), now=0)
    recent.remember(second, chain("x"), now=0)
    assert found(recent, chain("x", "y"), 1) == {first: 32, second: 16}
    recent.forget("a")
    assert found(recent, chain("x", "y"), 1) == {}


def test_memory_is_given_back_when_time_has_passed() -> None:
    """No sweep: what is not asked for again is dropped with its generation."""
    recent = RecentPrefixes(Books(), ttl_s=5)
    for now in range(1000):
        recent.remember(A, chain(str(now), "y", "z"), now)
        assert recent.statistics().entries <= 3 * 10
    found(recent, chain("x"), 2000)
    assert recent.statistics().entries == 0


def test_at_the_bound_the_oldest_go_first() -> None:
    """A flood of new prompts must not make the router grow, nor forget what was sent a moment
    ago."""
    recent = RecentPrefixes(Books(), ttl_s=5, max_entries=10)
    recent.remember(A, chain("old", "1", "2", "3", "4", "5"), now=0)
    recent.remember(A, chain("new", "1", "2"), now=5.5)
    recent.remember(A, chain("newer", "1", "2", "3"), now=6)
    assert recent.statistics().evicted == 6
    assert found(recent, chain("new", "1", "2"), 6) == {A: 48}
    assert found(recent, chain("newer", "1", "2", "3"), 6) == {A: 64}


def test_a_prompt_over_the_bound_keeps_its_beginning() -> None:
    """The beginning is what other prompts share."""
    recent = RecentPrefixes(Books(), ttl_s=5, max_entries=4)
    keys = chain(*map(str, range(10)))
    recent.remember(A, keys, now=0)
    assert found(recent, keys, 1) == {A: 4 * STEP}
    recent.remember(B, keys, now=1)
    assert found(recent, keys, 1) == {A: 4 * STEP}
    assert recent.statistics().truncated == 2
    assert recent.statistics().entries == 4


@pytest.mark.parametrize("settings", [{"ttl_s": 0}, {"ttl_s": float("nan")}, {"max_entries": 0}])
def test_senseless_settings_are_refused(settings: dict[str, float]) -> None:
    """They would switch the memory off without a word."""
    with pytest.raises(ValueError, match="recent: ttl_s"):
        RecentPrefixes(Books(), **settings)  # type: ignore[arg-type]


@dataclass
class Plain:
    """The same without cleverness: every key by itself."""

    ttl_s: float
    expiry: dict[tuple[SourceId, int], float] = field(default_factory=dict)

    def remember(self, source: SourceId, keys: list[int], now: float) -> None:
        self.expiry.update({(source, key): now + self.ttl_s for key in keys})

    def match(self, keys: list[int], step: int, now: float) -> dict[SourceId, int]:
        found = {}
        for source in (A, B, C):
            run = 0
            while run < len(keys) and self.expiry.get((source, keys[run]), now) > now:
                run += 1
            if run:
                found[source] = run * step
        return found

    def forget(self, replica: str) -> None:
        self.expiry = {name: at for name, at in self.expiry.items() if name[0].replica != replica}


# Few different tokens and replicas, so that prompts share beginnings of every length.
prompts = st.lists(st.sampled_from("xy"), max_size=12).map(lambda tokens: chain(*tokens))
steps = st.tuples(
    st.sampled_from(["remember", "remember", "match", "match", "forget"]),
    st.sampled_from([A, B, C]),
    prompts,
    st.floats(0, 4),
)


@given(st.lists(steps, max_size=40))
def test_it_equals_looking_at_every_key(
    history: list[tuple[str, SourceId, list[int], float]],
) -> None:
    """Bisection and generations must not change the answer."""
    recent, plain, now = RecentPrefixes(Books(), ttl_s=3), Plain(ttl_s=3), 0.0
    for what, source, keys, later in history:
        now += later
        if what == "remember":
            recent.remember(source, keys, now)
            plain.remember(source, keys, now)
        elif what == "forget":
            recent.forget(source.replica)
            plain.forget(source.replica)
        assert found(recent, keys, now) == plain.match(keys, STEP, now)


@given(st.lists(steps, max_size=40), st.integers(1, 20))
def test_at_the_bound_it_never_says_more_than_was_sent(
    history: list[tuple[str, SourceId, list[int], float]], max_entries: int
) -> None:
    """To have forgotten costs a cache hit; to invent would send a request to a cold replica."""
    recent, plain, now = (
        RecentPrefixes(Books(), ttl_s=3, max_entries=max_entries),
        Plain(ttl_s=3),
        0.0,
    )
    for _, source, keys, later in history:
        now += later
        recent.remember(source, keys, now)
        plain.remember(source, keys, now)
        allowed = plain.match(keys, STEP, now)
        assert all(tokens <= allowed[name] for name, tokens in found(recent, keys, now).items())
        assert recent.statistics().entries <= max_entries
