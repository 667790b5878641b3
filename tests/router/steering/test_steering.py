"""What is told with a request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from random import Random

from router.steering import MOST_BOUNDARIES, Hints, Steering
from router.steering.tails import Tails

STEP = 64
_FRESH = count(1_000_000)


def text(tokens: int) -> list[int]:
    """A text that shares no token with another."""
    return [next(_FRESH) for _ in range(tokens)]


def hints(steering: Steering, tokens: Sequence[int], ends: Sequence[int] = ()) -> Hints:
    keys = [hash(tuple(tokens[:end])) for end in range(STEP, len(tokens) + 1, STEP)]
    return steering.hints(keys, tokens, ends)


def test_a_boundary_is_named_where_the_fleet_has_seen_prompts_part() -> None:
    """Whichever replica computes the third question keeps the window for the fourth."""
    steering, document = Steering(), text(1000)
    hints(steering, document + text(100))
    hints(steering, document + text(100))
    assert 960 in hints(steering, document + text(100)).keep


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


def test_guesses_save_most_of_what_was_seen() -> None:
    """A boundary that is too late serves nobody, one that is too early serves less."""
    tails = Tails()
    for tail in [50] * 90 + [1500] * 10:
        tails.new()
        tails.parted(tail)
    assert tails.guesses(2000, 0)[0] == 2000 - 50
    assert tails.guesses(2000, 1990) == []
