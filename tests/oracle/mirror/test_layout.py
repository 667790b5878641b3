"""Where hits end, block by block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.oracle.mirror.layout import UNKNOWN


@given(
    boundaries=st.lists(st.integers(1, 40), max_size=5),
    tail=st.integers(0, 12),
    most=st.integers(0, 45),
)
def test_a_hit_ends_where_a_whole_tail_lies_before_it(
    boundaries: list[int], tail: int, most: int
) -> None:
    """Block by block, in place of the boundaries' distances."""
    kept = {block for end in boundaries for block in range(max(end - max(tail, 1), 0), end)}

    def is_hit(end: int) -> bool:
        if tail == 0:
            return end in boundaries
        return all(block in kept for block in range(max(end - tail, 0), end))

    layout = UNKNOWN._replace(hit_tokens=16, is_sparse=True, least_tail=tail * 16)
    expected = max((end for end in range(1, most + 1) if is_hit(end)), default=0)
    ends = sorted(end * 16 for end in boundaries)
    assert layout.longest_hit(ends, most * 16) == expected * 16
