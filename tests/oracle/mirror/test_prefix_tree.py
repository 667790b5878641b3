"""What prompts share, by a walk, is what a comparison with each of them says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.oracle.mirror.prefix_tree import PrefixTree

PROMPTS = [(1, 2, 3, 4, 5), (1, 2, 3, 6, 7), (1, 2, 8), (1, 2), (9,), (9, 10), (1, 2, 3)]


def test_a_question_walks_down_once() -> None:
    """The drawing in the module."""
    tree: PrefixTree[str] = PrefixTree()
    for keys, holder in zip(PROMPTS[:4], "AABB", strict=True):
        tree.add(keys, holder)
    assert len(tree) == 5
    assert tree.shared((1, 2, 3, 9)) == {"A": 3, "B": 2}
    assert tree.shared((9,)) == {}


added = st.tuples(st.sampled_from(PROMPTS), st.sampled_from("AB"))


@given(steps=st.lists(st.tuples(st.booleans(), added)), asked=st.sampled_from(PROMPTS))
def test_a_walk_finds_what_a_comparison_with_each_finds(
    steps: list[tuple[bool, tuple[tuple[int, ...], str]]], asked: tuple[int, ...]
) -> None:
    """In any order of coming and going; and what is empty holds nothing."""
    tree: PrefixTree[str] = PrefixTree()
    there: list[tuple[tuple[int, ...], str]] = []
    for is_new, prompt in steps:
        if is_new:
            tree.add(*prompt)
            there.append(prompt)
        elif prompt in there:
            tree.remove(*prompt)
            there.remove(prompt)
        expected: dict[str, int] = {}
        for keys, holder in there:
            same = 0
            while same < min(len(keys), len(asked)) and keys[same] == asked[same]:
                same += 1
            if same:
                expected[holder] = max(expected.get(holder, 0), same)
        assert tree.shared(asked) == expected
    for prompt in there:
        tree.remove(*prompt)
    assert len(tree) == 0
