"""The text of one answer while it grows, ended by the client's stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from offload.engine.http.tokenizer import Detokenizer


class TextStream:
    """Token ids in, text out. A text that may turn out to be a stop string's beginning is held
    back."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        """
        Args:
            detokenizer: Of this answer alone.
            stop: Strings that end the answer, none of them empty; they are no part of it.
        """
        self.stopped_by: str | None = None
        """The stop string that was met; nothing is written any more."""
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._held = ""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take ids; the text that is certain by now."""
        if self.stopped_by is not None:
            return ""
        return self._take(self._detokenizer.feed(token_ids), is_last=False)

    def finish(self) -> str:
        """No more ids will come: what was held back."""
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
        """Characters at the end that a stop string may begin with."""
        longest = max(map(len, self._stop), default=1) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next(
            (length for length in lengths if self._begins_stop(text[len(text) - length :])), 0
        )

    def _begins_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stop)
