"""Token ids, the special ones around them, and how they are cut: plain values."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal, TypeAlias

from router._core import pack_token_ids as _pack_token_ids

# An array of unsigned 32-bit integers (typecode "I"): a sequence of ints for readers, four bytes a
# token in memory, and a buffer that can be hashed without a loop over the tokens.
TokenIds: TypeAlias = "array[int]"

MODEL_LENGTH = -1
"""In `Truncation.max_tokens`: as many as the model takes; in vLLM one less where it generates."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """`truncate_prompt_tokens`: the engine keeps only *max_tokens* of the prompt."""

    max_tokens: int
    """Tokens to keep, special tokens included; or `MODEL_LENGTH`."""
    side: Literal["left", "right"]
    """Side that is cut away, `left` keeps the end of the prompt."""
    counts_special_tokens: bool
    """The client named the side: the finished ids are cut as they are. Otherwise the text is cut
    first, and the special tokens around it survive."""

    def cuts(self, count: int) -> bool:
        """Return whether a prompt of so many tokens is cut."""
        return 0 <= self.max_tokens < count


def pack_token_ids(json_array: bytes | memoryview) -> TokenIds | None:
    """The token ids of a JSON array; None for anything but integers in `[0, 2**32)`."""
    packed = _pack_token_ids(json_array)
    return None if packed is None else array("I", packed)


# --- `truncate_prompt_tokens`: which ids of a prompt the engine keeps -----------------------------

_MOST_SPECIAL_TOKENS = 16


@dataclass(frozen=True)
class Ends:
    """Ids placed before and after every prompt that gets special tokens."""

    before: TokenIds
    after: TokenIds

    def around(self, ids: TokenIds) -> TokenIds:
        """Return *ids* with the ends added."""
        return self.before + ids + self.after if self.before or self.after else ids


def ends_of(whole: TokenIds, bare: TokenIds) -> Ends | None:
    """The special tokens around a prompt; None where that is unknown.

    Args:
        bare: The same without special tokens.
    """
    added, size = len(whole) - len(bare), len(bare)
    if not 0 <= added <= _MOST_SPECIAL_TOKENS:
        return None
    places = [at for at in range(added + 1) if whole[at : at + size] == bare]
    return Ends(whole[: places[0]], whole[places[0] + size :]) if len(places) == 1 else None


def truncate(ids: TokenIds, truncation: Truncation | None, ends: Ends | None) -> TokenIds:
    """Cut *ids* as the engine cuts them.

    Args:
        ids: Finished ids, special tokens included.
        ends: The special tokens around *ids*; None if they are not known.
    """
    if truncation is None or not truncation.cuts(len(ids)):
        return ids
    if truncation.counts_special_tokens or ends is None:
        return _keep(ids, truncation.max_tokens, truncation.side)
    # The tokenizer itself truncates: the text gives way, the special tokens around it stay.
    body = ids[len(ends.before) : len(ids) - len(ends.after)]
    room = max(truncation.max_tokens - len(ends.before) - len(ends.after), 0)
    return ends.around(_keep(body, room, truncation.side))


def _keep(ids: TokenIds, count: int, side: str) -> TokenIds:
    return ids[len(ids) - count :] if side == "left" else ids[:count]
