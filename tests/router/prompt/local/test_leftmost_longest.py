"""The expression finds what a plain search for the leftmost, then longest word finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt.local.segmenter import compile_matcher

_WORDS = st.lists(st.text("ab<|>.", min_size=1, max_size=6), min_size=1, max_size=8)


def _find(words: list[str], text: str) -> list[str]:
    found, position = [], 0
    while position < len(text):
        here = [word for word in words if text.startswith(word, position)]
        if here:
            found.append(max(here, key=len))
            position += len(found[-1])
        else:
            position += 1
    return found


@given(words=_WORDS, text=st.text("ab<|>.", max_size=40))
def test_the_leftmost_then_longest_word_is_found(words: list[str], text: str) -> None:
    """A shorter token found where the library finds a longer one would move every cut behind it."""
    assert compile_matcher(words).findall(text) == _find(words, text)


def test_thousands_of_words_compile_and_match() -> None:
    """Vocabularies hold thousands of reserved tokens; a flat alternation of them would be tried one
    by one."""
    words = [f"<unused{index}>" for index in range(6000)]
    assert compile_matcher(words).findall("a<unused59>b<unused5999><unused6000>") == [
        "<unused59>",
        "<unused5999>",
    ]


def test_words_nested_without_end_are_reported_and_not_crashed_over() -> None:
    """The caller then tokenises whole texts."""
    with pytest.raises(RecursionError):
        compile_matcher("a" * length for length in range(1, 5000))
