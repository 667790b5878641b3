"""What is told with a request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from random import Random

from router.prompt.prompts import MessageEnds
from router.routing.steering import MAX_TENANTS, MOST_BOUNDARIES, Hints, Steering
from router.routing.tails import Tails

STEP = 64
_FRESH = count(1_000_000)


def text(tokens: int) -> list[int]:
    """A text that shares no token with another."""
    return [next(_FRESH) for _ in range(tokens)]


def keys_of(tokens: Sequence[int], tenant: str = "") -> list[int]:
    return [hash((tenant, *tokens[:end])) for end in range(STEP, len(tokens) + 1, STEP)]


def hints(
    steering: Steering,
    tokens: Sequence[int],
    ends: Sequence[int] = (),
    named: Sequence[int] = (),
    tenant: str = "",
) -> Hints:
    message_ends = MessageEnds(tuple(ends), tuple(named))
    return steering.hints(keys_of(tokens, tenant), tokens, message_ends, tenant)


def test_a_boundary_is_named_where_the_fleet_has_seen_prompts_part() -> None:
    """Whichever replica computes the third question keeps the window for the fourth."""
    steering, document = Steering(), text(1000)
    hints(steering, document + text(100))
    hints(steering, document + text(100))
    assert 1000 in hints(steering, document + text(100)).keep


def test_the_end_of_a_message_is_named_before_anything_parted() -> None:
    """A chat template tells where the system prompt ends: one cold computing fewer."""
    assert hints(Steering(), text(1000), [700]).keep == (700,)


def test_ends_of_messages_that_are_never_asked_for_again_are_no_longer_named() -> None:
    """Each costs a window in every group, which drives out what others reuse."""
    steering = Steering()
    named = [bool(hints(steering, text(300), [200]).keep) for _ in range(400)]
    assert named[0]
    assert not named[-1]
    statistics = steering.statistics()
    assert statistics.message_ends == sum(named) < 300


def test_a_new_prompt_is_cut_where_others_were_left() -> None:
    """Plain completions tell of no messages; how long questions are is learned from those that
    parted."""
    steering, random = Steering(), Random(1)
    for _ in range(60):
        document = text(1000)
        for _ in range(2):
            hints(steering, document + text(random.randint(20, 200)))
    document = text(2000)
    keep = hints(steering, document + text(150)).keep
    assert keep
    assert max(end for end in keep if end <= 2000) > 1800


def test_where_nothing_is_ever_shared_nothing_is_named() -> None:
    """Scans are read once: a window kept of them is lost to others."""
    steering = Steering()
    keeps = [hints(steering, text(500)).keep for _ in range(100)]
    assert not any(keeps)


def test_responses_are_kept_where_sessions_go_on() -> None:
    """The next turn resumes behind the response instead of behind the prompt."""
    steering = Steering()
    for _ in range(40):
        session = text(100)
        for _ in range(4):
            session += text(50)
            chats = hints(steering, session)
    assert chats.keep_end
    single = Steering()
    for _ in range(40):
        last = hints(single, text(200))
    assert not last.keep_end


def test_no_request_names_more_than_an_engine_takes() -> None:
    """A tree of prompts has a branch at every level."""
    steering = Steering()
    stem = text(64 * 20)
    for level in range(1, 20):
        for _ in range(3):
            hints(steering, stem[: 64 * level] + text(70))
    found = hints(steering, stem + text(70), list(range(64, 1280, 64)))
    assert len(found.keep) == MOST_BOUNDARIES
    assert list(found.keep) == sorted(found.keep)


def test_exact_lengths_count_alone_once_there_are_enough() -> None:
    """The others are up to a step too long, and each boundary would lie before the right one."""
    tails = Tails()
    for number in range(40):
        tails.new()
        tails.parted(100)
        if number % 2:
            tails.exactly(40)
    assert tails.guesses(2000, 0) == [1960]


def test_guesses_save_most_of_what_was_seen() -> None:
    """A boundary that is too late serves nobody, one that is too early serves less."""
    tails = Tails()
    for tail in [50] * 90 + [1500] * 10:
        tails.new()
        tails.parted(tail)
    assert tails.guesses(2000, 0)[0] == 2000 - 50
    assert tails.guesses(2000, 1990) == []


def test_a_tenant_that_names_what_nobody_asks_for_is_soon_not_heard() -> None:
    """`cache_control` in every request of a flood would drive out what others reuse."""
    steering = Steering()
    named = [bool(hints(steering, text(300), named=[200], tenant="a").keep) for _ in range(400)]
    assert named[0]
    assert not named[-1]
    assert hints(steering, text(300), named=[200], tenant="b").keep == (200,)


def test_a_client_that_names_what_is_asked_for_again_is_heard() -> None:
    """A few agents with one system prompt each."""
    steering = Steering()
    for _ in range(100):
        system = text(500)
        for _ in range(3):
            keep = hints(steering, system + text(200), named=[500]).keep
            assert 500 in keep


def test_what_one_tenant_sends_makes_no_other_forget() -> None:
    """A flood fills the memory with its own."""
    steering, document = Steering(max_keys=1000), text(1000)
    for _ in range(3):
        hints(steering, document + text(100), tenant="a")
    for _ in range(200):
        hints(steering, text(3000), tenant="flood")
    assert steering.statistics().keys <= 1000
    assert 1000 in hints(steering, document + text(100), tenant="a").keep


def test_tenants_are_bounded() -> None:
    """Their names come from keys, but adapters and salts come with requests."""
    steering = Steering()
    for number in range(MAX_TENANTS + 100):
        hints(steering, text(200), tenant=str(number))
    assert steering.statistics().keys == MAX_TENANTS * 3


def test_what_became_of_a_boundary_is_counted_when_it_is_asked_for_again() -> None:
    """Whether hints pay shows in what hits end there."""
    steering, document = Steering(), text(1000)
    steering.count_outcome(steering.named(keys_of(document)), 0, 16)
    hints(steering, document + text(100), [1000])
    keys = keys_of(document + text(100))
    for cached_tokens in (0, 976, 992, 1088):
        steering.count_outcome(steering.named(keys), cached_tokens, 16)
    found = steering.statistics()
    assert (found.lost, found.kept, found.hit, found.hit_tokens) == (2, 2, 1, 992)
