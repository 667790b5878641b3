"""What besides tokens decides a block: as marks for our keys, and in the spellings of engines."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.index.prompt import (
    besides_lora,
    plain,
    spellings,
    tagged,
)
from tests.oracle.index.keys import Mark, digest
from tests.oracle.index.marks import marks_of


def test_a_salt_from_the_event_and_one_from_the_request_are_the_same_mark() -> None:
    """The event carries it among the first block's extra keys, the request as a field of its
    own."""
    assert (
        marks_of([["tenant-a"], None], 16)
        == marks_of(None, 16, cache_salt="tenant-a")
        == [Mark(0, digest("tenant-a"))]
    )
    assert marks_of([["tenant-a"], None], 16, cache_salt="tenant-a") == [
        Mark(0, digest("tenant-a"))
    ]
    assert marks_of(None, 16, cache_salt="tenant-b") != marks_of(None, 16, cache_salt="tenant-a")
    assert (
        marks_of(None, 16)
        == marks_of([None, [], ()], 16)
        == marks_of(None, 16, cache_salt="")
        == []
    )


def test_an_adapters_name_in_the_extra_keys_is_no_mark() -> None:
    """It is in the root already, and stands first in every block's entry."""
    assert marks_of([["sql"], ["sql"]], 16, lora_name="sql") == []
    assert marks_of([["sql", "tenant-a"], ["sql"]], 16, lora_name="sql") == [
        Mark(0, digest("tenant-a"))
    ]
    assert marks_of([["sql", "sql"]], 16, lora_name="sql") == [Mark(0, digest("sql"))]
    assert marks_of([["sql"]], 16) == [Mark(0, digest("sql"))]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 63), st.integers(1, 40)), max_size=4),
    st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
)
def test_images_make_the_same_marks_at_any_block_size(
    images: list[tuple[int, int]], block_size: int
) -> None:
    """A window with blocks of 16 and full attention with blocks of 64 announce the same prompt."""
    expected = sorted(
        {Mark(start, digest(f"image-{number}")) for number, (start, _) in enumerate(images)}
    )
    assert marks_of(image_keys(images, block_size), block_size) == expected


def image_keys(images: list[tuple[int, int]], block_size: int) -> list[list[list[object]]]:
    """Extra keys of a prompt with `(start, length)` images, as an engine writes them: offsets count
    from the block's start."""
    last = max((start + length for start, length in images), default=0)
    return [
        [
            [f"image-{number}", start - block]
            for number, (start, length) in enumerate(images)
            if start < block + block_size and start + length > block
        ]
        for block in range(0, last, block_size)
    ]


def test_an_image_behind_the_block_that_a_lookahead_covers_counts_where_it_starts() -> None:
    """With speculative decoding a block's entry names what starts within the next tokens, too."""
    entry = [["image", 17]]
    assert marks_of([entry], 16) == []
    assert marks_of([entry], 16, lookahead=2) == [Mark(17, digest("image"))]
    assert marks_of([entry, [["image", 1]]], 16, lookahead=2) == [Mark(17, digest("image"))]


def test_the_same_image_in_two_places_is_two_marks() -> None:
    """It is the content and the place that decide."""
    assert [mark.position for mark in marks_of([[["image", 2], ["image", 9]]], 16)] == [2, 9]


def test_besides_lora_takes_off_only_a_leading_name() -> None:
    """A salt may spell like an adapter."""
    assert list(besides_lora(["sql", "x"], "sql")) == ["x"]
    assert list(besides_lora(["x", "sql"], "sql")) == ["x", "sql"]
    assert list(besides_lora(["sql"], None)) == ["sql"]
    odd: list[object] = [None, [], 5, "sql", {}]
    assert [list(besides_lora(entry, "sql")) for entry in odd] == [[]] * 5


def test_tags_and_plain_forms_are_those_that_engines_hash() -> None:
    """vLLM names the source of every key from 0.31 on; tuples, never lists, go into a pickle."""
    assert tagged(["image", 3]) == ("mm", "image", 3)
    assert tagged("tenant-a") == ("cache_salt", "tenant-a")
    assert tagged(b"\x01") == ("prompt_embeds", b"\x01")
    assert plain([["image", [3]], "x"]) == (("image", (3,)), "x")
    assert plain("x") == "x"


def test_a_salt_that_the_extra_keys_have_already_is_hashed_once() -> None:
    """An engine's own events carry it there; twice in one block, no hash would ever fit."""
    both = list(spellings([("tenant",)], 2, cache_salt="tenant"))
    assert both == list(spellings(None, 2, cache_salt="tenant"))
    assert both[0] == [("tenant",), None]
