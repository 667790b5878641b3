"""Where prompts part, against plain prompts of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from router.routing.branches import BranchPoints, PromptBranches

STEP = 4


def keys_of(tokens: Sequence[int]) -> list[int]:
    """As an index makes them: equal keys, equal prefixes."""
    return [hash(tuple(tokens[:end])) for end in range(STEP, len(tokens) + 1, STEP)]


def see(points: BranchPoints, tokens: Sequence[int]) -> PromptBranches:
    return points.record(keys_of(tokens), tokens)


def test_prompts_part_behind_what_they_share() -> None:
    """From the second question on, the end of a document is worth a window."""
    points = BranchPoints(STEP)
    document = list(range(10, 20))
    assert see(points, [*document, 1, 1, 1]).branches == []
    second = see(points, [*document, 2, 2, 2])
    assert (second.branches, second.new_branch, second.known_tokens) == ([8], 8, 8)
    third = see(points, [*document, 3])
    assert (third.branches, third.new_branch, third.exact_branch) == ([10], 0, 10), "to the token"
    other = see(points, [*document[:9], 4, 4])
    assert other.branches == [9], "all of them have had so much"
    assert see(points, [*document[:8], 5, 5]).branches == [8]


def test_a_short_question_parts_as_well() -> None:
    """What is shorter than a step has no key of its own."""
    points = BranchPoints(STEP)
    see(points, [1, 2, 3, 4, 50])
    assert see(points, [1, 2, 3, 4, 60]).branches == [4]


def test_the_next_turn_of_a_session_parts_from_nothing() -> None:
    """It goes on where its own last prompt ended, and engines keep that by themselves."""
    points, tokens = BranchPoints(STEP), [1, 2, 3, 4, 5, 6]
    assert not see(points, tokens).is_continued
    for turn in range(5):
        tokens = [*tokens, *range(100 * turn, 100 * turn + 7)]
        assert see(points, tokens) == PromptBranches([], True, len(tokens[:-7]) // STEP * STEP, 0)


def test_an_equal_prompt_is_no_branch() -> None:
    """A regenerated response asks for the whole prompt."""
    points = BranchPoints(STEP)
    for _ in range(3):
        assert see(points, [1, 2, 3, 4, 5, 6, 7, 8, 9]).branches == []
    for _ in range(3):
        assert see(points, [1, 2, 3, 4, 5, 6, 7, 8, 10]).branches == [8]


def test_what_was_seen_first_is_forgotten_first() -> None:
    """A router runs for months."""
    points = BranchPoints(STEP)
    for first in range(100):
        see(points, range(first, first + 40))
    count = len(points)
    points.forget(count - 10)
    assert len(points) == 10
    assert see(points, range(99, 139)).known_tokens == 40
    assert see(points, range(40)).known_tokens == 0


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=16), max_size=12))
def test_branches_are_where_two_prompts_differ(prompts: list[list[int]]) -> None:
    """Against comparing with every earlier prompt: each branch is a prefix that two prompts share,
    and they do not share the step that it ends in, or that follows it."""
    points = BranchPoints(STEP)
    earlier: list[list[int]] = []
    for prompt in prompts:
        seen = see(points, prompt)
        earlier.append(prompt)
        for branch in seen.branches:
            following = {
                tuple(other[branch : branch // STEP * STEP + STEP])
                for other in earlier
                if other[:branch] == prompt[:branch]
            }
            assert len(following) > 1
