"""`truncate_prompt_tokens`: which ids of a prompt the engine keeps."""

from __future__ import annotations

from dataclasses import dataclass

from router.prompt.prompts import TokenIds, Truncation


@dataclass(frozen=True)
class Ends:
    """Ids placed before and after every prompt that gets special tokens."""

    before: TokenIds
    after: TokenIds

    def around(self, ids: TokenIds) -> TokenIds:
        """Return *ids* with the ends added."""
        return self.before + ids + self.after if self.before or self.after else ids


_MOST_SPECIAL_TOKENS = 16


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
