"""Finds where the messages of a chat end, in tokens: there its prompt will part from later ones.

The template has written the messages into one text. A message's text stands there as it was sent,
inside the template's own text, so the messages are found in it one after the other; one that the
template changed is passed over. What lies between two of them, from the markers that end the one to
the header of the next, is the same in all chats: the boundary is the last anchor there (see
`segments.py`), whose token is found among the prompt's. Only within a message, where a long part
such as a document ends, a boundary has no anchor of its own: then the text from the last anchor on
is counted in tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from router.prompt.local.segmenter import Segmenter
from router.prompt.prompts import NO_ENDS, ChatPiece, MessageEnds
from router.prompt.token_ids import TokenIds

MOST_EXPECTED = 8
"""The number of first messages of a chat that others may share."""
_MOST_PIECES = 4096
_HEADER_CHARS = 128
"""The most characters between an anchor and its message."""
_MOST_COUNTED_CHARS = 1_048_576


class _Boundary(NamedTuple):
    char: int
    """Where the next message begins."""
    is_named: bool


class EndFinder:
    """Finds the ends for one tokenizer."""

    def __init__(self, segmenter: Segmenter, anchor_ids: Mapping[str, int]) -> None:
        self._segmenter = segmenter
        self._anchor_ids = anchor_ids

    def find(
        self, text: str, pieces: Sequence[ChatPiece], ids: TokenIds, count: Callable[[str], int]
    ) -> MessageEnds:
        """Return the boundaries between the pieces.

        Args:
            pieces: The texts of the messages, in their order.
            ids: Its tokens; special ones may stand before them.
            count: Returns how many tokens a text has.
        """
        boundaries = list(_boundaries(text, pieces))
        if not boundaries:
            return NO_ENDS
        last = boundaries[-1].char
        anchors = [at for at in self._segmenter.starts(text) if at <= last]
        positions = self._positions(text, anchors, ids)
        found = [
            (tokens, boundary.is_named)
            for boundary in boundaries
            if (tokens := _tokens_at(boundary.char, text, anchors, positions, count)) > 0
        ]
        return MessageEnds(
            tuple(dict.fromkeys(tokens for tokens, is_named in found if not is_named)),
            tuple(dict.fromkeys(tokens for tokens, is_named in found if is_named)),
        )

    def _positions(self, text: str, anchors: Sequence[int], ids: TokenIds) -> list[int]:
        """Return the places of the anchors among the ids, as far as found."""
        positions: list[int] = []
        at = 0
        for start in anchors:
            try:
                at = ids.index(self._anchor_ids[self._segmenter.anchor_at(text, start)], at)
            except (KeyError, ValueError):
                break
            positions.append(at)
            at += 1
        return positions


def _tokens_at(
    char: int,
    text: str,
    anchors: Sequence[int],
    positions: Sequence[int],
    count: Callable[[str], int],
) -> int:
    """Return the tokens before a character, or a few less; 0 where unknown."""
    number = bisect_right(anchors, char) - 1
    if not 0 <= number < len(positions):
        return 0
    start = anchors[number]
    if char - start <= _HEADER_CHARS:
        return positions[number]
    if char - start > _MOST_COUNTED_CHARS:
        return 0
    # The last token of a text may be another one where more follows.
    return positions[number] + max(count(text[start:char]) - 1, 0)


def _boundaries(text: str, pieces: Iterable[ChatPiece]) -> Iterator[_Boundary]:
    """Yield where messages behind the first begin: a few of them, and those that the client
    named."""
    at, expected, before = 0, 0, None
    for piece in pieces:
        wanted = piece.text.strip()
        start = text.find(wanted, at) if wanted else -1
        if start < 0:
            continue
        if before is not None and (before.is_named or expected < MOST_EXPECTED):
            expected += not before.is_named
            yield _Boundary(start, before.is_named)
        at, before = start + len(wanted), piece


def pieces_of(messages: Sequence[Mapping[str, Any]]) -> list[ChatPiece]:
    """Return the texts of a chat's messages, in the OpenAI form: each part that is text is one
    piece."""
    pieces: list[ChatPiece] = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                is_named = isinstance(part, Mapping) and bool(part.get("cache_control"))
                pieces.append(ChatPiece(text, is_named))
        if len(pieces) >= _MOST_PIECES:
            break
    return pieces
