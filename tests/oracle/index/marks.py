"""What besides tokens decides the content of a block, as marks at tokens: so our keys take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.index.prompt import besides_lora
from tests.oracle.index.keys import Mark, digest


def marks_of(
    extra_keys: Sequence[Any] | None,
    block_size: int,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    lookahead: int = 0,
) -> list[Mark]:
    """The marks of a token run, ascending.

    The LoRA name, first in every entry, is left out, since the root key covers it. A multimodal
    item counts where it starts. For one at token 20 and blocks of 16, an engine writes the offset
    4 in block 1 and, if the item is long, -12 in block 2: only the first makes a mark. How often an
    item repeats depends on the block size; where it starts does not.

    Args:
        extra_keys: One entry per block, in the events' untagged form.
        block_size: Tokens per entry.
        lora_name: The adapter of the run.
        cache_salt: A salt that the entries may or may not carry.
        lookahead: Tokens behind a block that its entry covers too.
    """
    marks = {Mark(0, digest(cache_salt))} if cache_salt else set()
    for index, entry in enumerate(extra_keys or ()):
        for item in besides_lora(entry, lora_name):
            offset = _offset(item)
            if 0 <= offset < block_size + lookahead:
                marks.add(Mark(index * block_size + offset, digest(_identity(item))))
    return sorted(marks)


def _offset(item: Any) -> int:
    """Tokens from the start of the block to the start of a multimodal item; 0 for anything else."""
    if isinstance(item, (list, tuple)) and len(item) == 2 and isinstance(item[1], int):
        return item[1]
    return 0


def _identity(item: Any) -> Any:
    return item[0] if isinstance(item, (list, tuple)) and item else item
