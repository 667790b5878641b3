"""What besides tokens decides the content of a block: LoRA adapter, salt, multimodal items.

Engines carry it as *extra keys*, one entry a block. Our keys take it as marks at tokens; an
engine's hash takes the entries themselves, spelled as its version spells them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvevents.hashing import ExtraKeys
from router.index.reference.keys import Mark, digest


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


def besides_lora(entry: Any, lora_name: str | None) -> Sequence[Any]:
    """A block's extra keys without the adapter's name.

    Args:
        entry: Of one block; anything but a list holds no keys.
        lora_name: Left out where it comes first.
    """
    items = entry if isinstance(entry, (list, tuple)) else ()
    return items[1:] if items and lora_name is not None and items[0] == lora_name else items


def spellings(
    extra_keys: Sequence[Any] | None,
    blocks: int,
    lora_name: str | None = None,
    cache_salt: str | None = None,
) -> Iterator[list[ExtraKeys]]:
    """The ways in which engines may spell the extra keys that they hash.

    vLLM <= 0.30 hashes the bare values; vLLM >= 0.31 tags them, and so does our engine. The
    adapter's path, which vLLM hashes too, cannot be seen from here.

    Args:
        extra_keys: One entry per block, in the events' untagged form.
        blocks: In the prompt, the last one perhaps cut short.
        lora_name: The adapter of the prompt.
        cache_salt: The request's salt.
    """
    if not (lora_name or cache_salt or extra_keys):
        yield []
        return
    entries = [besides_lora(entry, lora_name) for entry in extra_keys or ()]
    entries += [()] * (blocks - len(entries))
    if cache_salt and cache_salt not in entries[0]:
        entries[0] = (*entries[0], cache_salt)
    adapter = (lora_name,) if lora_name else ()
    yield [plain((*adapter, *entry)) or None for entry in entries]
    tagged_adapter = (("lora", lora_name),) if lora_name else ()
    yield [(*tagged_adapter, *map(tagged, entry)) or None for entry in entries]


def tagged(item: Any) -> tuple[Any, ...]:
    """One extra key as vLLM >= 0.31 hashes it, with the kind of thing it is."""
    if isinstance(item, (list, tuple)):
        return ("mm", *item)
    return ("prompt_embeds" if isinstance(item, bytes) else "cache_salt", item)


def plain(value: Any) -> Any:
    """Lists as tuples, all the way down: the form in which extra keys go into an engine's hash."""
    return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value


def _offset(item: Any) -> int:
    """Tokens from the start of the block to the start of a multimodal item; 0 for anything else."""
    if isinstance(item, (list, tuple)) and len(item) == 2 and isinstance(item[1], int):
        return item[1]
    return 0


def _identity(item: Any) -> Any:
    return item[0] if isinstance(item, (list, tuple)) and item else item
