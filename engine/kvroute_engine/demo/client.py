"""An HTTP client for the demo's engines and router: small queries, and streamed completions with
their times."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from kvroute_engine.demo.processes import DemoFailed
from router.config.origin import Origin, Timeouts
from router.fleet.client import UpstreamClient

_TIMEOUTS = Timeouts(connect_s=5, first_byte_s=120, idle_s=120)
_MAX_RESPONSE_BYTES = 64 * 1024 * 1024
_JSON = ((b"content-type", b"application/json"),)


@dataclass(frozen=True, slots=True)
class TimedCompletion:
    """One completion, with its time and its cached tokens."""

    replica: str
    predicted_tokens: int
    """Prompt tokens that the router predicted to be cached."""
    cached_tokens: int
    """Prompt tokens that the engine reported as cached."""
    prompt_tokens: int
    ttft_s: float


class Client:
    """A client of one server. Close it after use."""

    def __init__(self, url: str) -> None:
        self._origin = Origin.parse(url)
        self._upstream = UpstreamClient()

    async def close(self) -> None:
        """Close every connection."""
        await self._upstream.close()

    async def get(self, path: str) -> bytes:
        """Return the body of the response.

        Raises:
            DemoFailed: Its status is not 200.
        """
        return await self._fetch(b"GET", path, b"")

    async def get_json(self, path: str) -> Any:
        """Return the decoded body of the response; raises like `get`."""
        return msgspec.json.decode(await self.get(path))

    async def post(self, path: str, value: object = None) -> bytes:
        """Return the body of the response.

        Args:
            value: Sent as JSON; None for an empty body.
        Raises:
            DemoFailed: Its status is not 200.
        """
        return await self._fetch(
            b"POST", path, b"" if value is None else msgspec.json.encode(value)
        )

    async def complete(self, model: str, prompt: list[int], max_tokens: int) -> TimedCompletion:
        """Request a streamed completion and read it to its end.

        Args:
            max_tokens: Exactly this many are generated.
        Raises:
            DemoFailed: The status of the response is not 200.
        """
        request = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.monotonic()
        response = await self._upstream.send(
            self._origin,
            b"POST",
            b"/v1/completions",
            _JSON,
            msgspec.json.encode(request),
            _TIMEOUTS,
        )
        ttft_s = time.monotonic() - started
        body = bytearray()
        while chunk := await response.read_chunk():
            body += chunk
        _require_ok("POST /v1/completions", response.status, bytes(body))
        headers = {name.lower(): value for name, value in response.headers}
        return _completion(bytes(body), headers, ttft_s)

    async def _fetch(self, method: bytes, path: str, body: bytes) -> bytes:
        status, response = await self._upstream.fetch(
            self._origin,
            path.encode(),
            _TIMEOUTS,
            _MAX_RESPONSE_BYTES,
            _JSON if body else (),
            method,
            body,
        )
        _require_ok(f"{method.decode()} {path}", status, response)
        return response


def _require_ok(request: str, status: int, body: bytes) -> None:
    if status != 200:
        shown = body[:300].decode(errors="replace")
        raise DemoFailed(f"{request}: status {status}: {shown}")


def _completion(stream: bytes, headers: dict[bytes, bytes], ttft_s: float) -> TimedCompletion:
    events = [
        line[6:]
        for line in stream.splitlines()
        if line.startswith(b"data: ") and line != b"data: [DONE]"
    ]
    chunks = [msgspec.json.decode(event) for event in events]
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    return TimedCompletion(
        replica=headers[b"x-kv-replica"].decode(),
        predicted_tokens=int(headers[b"x-kv-hit-tokens"]),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        prompt_tokens=usage["prompt_tokens"],
        ttft_s=ttft_s,
    )
