"""Passes the events of one cache to a recorder as they happen: batches applied, prompts sent there,
and the engine's reports on them.

Nothing is kept without a listener. The lines are those of `router/cli/recordings.py`.
"""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec
from async_timeout import timeout

from router.errors import NotRecordable
from router.index.base import SourceId

MAX_TAPS = 4
MAX_WAITING_BYTES = 64 * 2**20
"""The bound on lines that wait for their listener; a slower one is cut off."""
MAX_STATE_BYTES = 128 * 2**20


class Tap:
    """One listener's lines. Belongs to one event loop."""

    def __init__(self, source: SourceId) -> None:
        self.source = source
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._numbers = 0
        self._ended = False
        self._news = asyncio.Event()

    def begin(self, state: Iterable[bytes]) -> None:
        """Write the header, and the cache as the index has it now.

        Raises:
            NotRecordable: It is too large for a line.
        """
        records = list(state)
        if sum(map(len, records)) > MAX_STATE_BYTES:
            raise NotRecordable(f"its state has more than {MAX_STATE_BYTES} bytes")
        name = f"{self.source.replica} rank {self.source.dp_rank}"
        self._put({"name": name, "source": "recorded by kvroute"})
        self._put({"state": [_text(record) for record in records]}, is_bounded=False)

    def batch(self, payload: bytes) -> None:
        """Write a batch that is about to be applied."""
        self._put({"frame": _text(payload)})

    def query(
        self,
        token_ids: Iterable[int],
        salt: str | None,
        lora: str | None,
        extra_keys: Iterable[Any] | None,
    ) -> int:
        """Write a prompt that is about to be sent there; return its number."""
        self._numbers += 1
        found = {"salt": salt, "lora": lora, "extra_keys": extra_keys}
        shown = {name: value for name, value in found.items() if value is not None}
        self._put({"query": list(token_ids), **shown, "number": self._numbers})
        return self._numbers

    def hit(self, number: int, tokens: int) -> None:
        """Write the tokens of a prompt that the engine reused.

        Args:
            number: The prompt's, from `query`.
        """
        self._put({"number": number, "hit": tokens})

    def end(self, reason: str) -> None:
        """Write the last line."""
        if not self._ended:
            self._put({"end": reason}, is_bounded=False)
        self._ended = True

    async def lines(self, patience_s: float) -> AsyncIterator[bytes]:
        """Yield the lines from `begin` to `end`; an empty line after every *patience_s* without
        any."""
        while self._lines or not self._ended:
            if not self._lines:
                self._news.clear()
                try:
                    async with timeout(patience_s):
                        await self._news.wait()
                except asyncio.TimeoutError:
                    yield b"\n"
                continue
            line = self._lines.popleft()
            self._waiting_bytes -= len(line)
            yield line

    def _put(self, value: dict[str, Any], is_bounded: bool = True) -> None:
        if self._ended:
            return
        line = msgspec.json.encode(value) + b"\n"
        if is_bounded and self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
            self.end(f"more than {MAX_WAITING_BYTES} bytes waited for their reader")
            return
        self._waiting_bytes += len(line)
        self._lines.append(line)
        self._news.set()


class Taps:
    """The listeners to each cache."""

    def __init__(self) -> None:
        self._taps: dict[SourceId, list[Tap]] = {}
        self.on_change: Callable[[], object] = lambda: None

    def __bool__(self) -> bool:
        return bool(self._taps)

    def of(self, source: SourceId) -> tuple[Tap, ...]:
        return tuple(self._taps.get(source, ()))

    def open(self, source: SourceId, state: Iterable[bytes]) -> Tap:
        """Begin to listen to a cache. The caller closes the tap.

        Args:
            state: The index's records of it now.
        Raises:
            NotRecordable: Too many listeners, or the state is too large.
        """
        if sum(map(len, self._taps.values())) >= MAX_TAPS:
            raise NotRecordable(f"{MAX_TAPS} recordings are under way, which is the limit")
        tap = Tap(source)
        tap.begin(state)
        self._taps.setdefault(source, []).append(tap)
        self.on_change()
        return tap

    def close(self, tap: Tap) -> None:
        listening = self._taps.get(tap.source, [])
        if tap in listening:
            listening.remove(tap)
        if not listening:
            self._taps.pop(tap.source, None)
            self.on_change()

    def end(self, source: SourceId, reason: str) -> None:
        """Write the last line to every listener of a cache."""
        for tap in self.of(source):
            tap.end(reason)


def _text(payload: bytes) -> str:
    return base64.b64encode(payload).decode()
