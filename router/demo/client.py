"""The demo's clients: a streamed completion, timed, and questions about the state of things."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from router.demo.processes import DemoFailed
from router.upstream import Origin, Timeouts, UpstreamClient

_TIMEOUTS = Timeouts(connect_s=5, first_byte_s=120, idle_s=120)
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_JSON = ((b"content-type", b"application/json"),)


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer."""

    replica: str
    predicted_tokens: int
    """What the router said would be reused."""
    cached_tokens: int
    """What the replica reused."""
    prompt_tokens: int
    ttft_s: float


class Client:
    """Talks to one server. Close it."""

    def __init__(self, url: str) -> None:
        self._origin = Origin.parse(url)
        self._upstream = UpstreamClient()

    async def close(self) -> None:
        await self._upstream.close()

    async def get(self, path: str) -> bytes:
        """The body of an answer with status 200."""
        return await self._fetch(b"GET", path, b"")

    async def get_json(self, path: str) -> Any:
        return msgspec.json.decode(await self.get(path))

    async def post(self, path: str, value: object = None) -> bytes:
        """The body of an answer with status 200."""
        return await self._fetch(
            b"POST", path, b"" if value is None else msgspec.json.encode(value)
        )

    async def complete(self, model: str, prompt: list[int], max_tokens: int) -> Completion:
        """A streamed completion of token ids."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.monotonic()
        response = await self._upstream.send(
            self._origin, b"POST", b"/v1/completions", _JSON, msgspec.json.encode(body), _TIMEOUTS
        )
        ttft_s = time.monotonic() - started
        said = bytearray()
        while chunk := await response.read_chunk():
            said += chunk
        if response.status != 200:
            raise DemoFailed(
                f"POST /v1/completions: status {response.status}: {bytes(said[:300]).decode(errors='replace')}"
            )
        headers = {name.lower(): value for name, value in response.headers}
        return _completion(bytes(said), headers, ttft_s)

    async def _fetch(self, method: bytes, path: str, body: bytes) -> bytes:
        status, _, answer = await self._upstream.fetch(
            self._origin,
            method,
            path.encode(),
            body,
            _TIMEOUTS,
            _MAX_ANSWER_BYTES,
            _JSON if body else (),
        )
        if status != 200:
            raise DemoFailed(
                f"{method.decode()} {path}: status {status}: {answer[:200].decode(errors='replace')}"
            )
        return answer


def _completion(stream: bytes, headers: dict[bytes, bytes], ttft_s: float) -> Completion:
    events = [
        line[6:]
        for line in stream.splitlines()
        if line.startswith(b"data: ") and line != b"data: [DONE]"
    ]
    chunks = [msgspec.json.decode(event) for event in events]
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    return Completion(
        replica=headers[b"x-kv-replica"].decode(),
        predicted_tokens=int(headers[b"x-kv-hit-tokens"]),
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        prompt_tokens=usage["prompt_tokens"],
        ttft_s=ttft_s,
    )
