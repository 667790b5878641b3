"""The text of one response while it grows, ended by the client's stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute_engine.http.tokenizer import Detokenizer


class TextStream:
    """Token ids in, text out; text that may be the start of a stop string is held back.

    Example, with the stop string "END": after "one E" it has returned "one " and holds "E". After
    "one EN" it holds "EN"; "one ENd" returns "ENd"; "one END" ends the response at "one ".
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        """
        Args:
            stop: Strings that end the response and are not part of it; not empty.
        """
        self.stopped_by: str | None = None
        """The stop string that ended the response; there is no more text after it."""
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._held = ""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take ids; return the text that is certain now."""
        if self.stopped_by is not None:
            return ""
        return self._take(self._detokenizer.feed(token_ids), is_last=False)

    def finish(self) -> str:
        """Return the text held back, since no more ids will come."""
        if self.stopped_by is not None:
            return ""
        return self._take(self._detokenizer.finish(), is_last=True)

    def _take(self, new: str, is_last: bool) -> str:
        text = self._held + new
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, self.stopped_by = min(found)
            self._held = ""
            return text[:end]
        kept = 0 if is_last else self._open_chars(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _open_chars(self, text: str) -> int:
        """Return the length of the longest end of *text* that a stop string starts with."""
        longest = max(map(len, self._stop), default=1) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next(
            (length for length in lengths if self._begins_stop(text[len(text) - length :])), 0
        )

    def _begins_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stop)
