"""Engines that compute prompts for each other as vLLM's `NixlConnector` has it, to the letter: who
computes a prompt keeps it under a name that only its response tells, and gives it away once."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from tests.support.engine_stub import Behaviour, EngineStub, Exchange, answer

FIELD = "kv_transfer_params"
LIMITS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}


def of_one_token(path: str, body: dict[str, Any]) -> bool:
    """Whether the body asks for one token, in one piece."""
    if path == "/inference/v1/generate":
        limits, least = [body["sampling_params"].get("max_tokens")], body["sampling_params"]
    else:
        limits, least = [body.get(name) for name in LIMITS[path]], body
    is_whole = body["stream"] is False and "stream_options" not in body
    is_kept = path == "/v1/responses" and (body["store"] or "background" in body)
    return set(limits) == {1} and is_whole and "min_tokens" not in least and not is_kept


@dataclass
class Handover:
    """What has been computed and waits to be fetched, by name; shared by the engines of a pair."""

    held: dict[str, EngineStub] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def prefill(self, exchange: Exchange) -> None:
        """Compute a prompt for somebody else, and say where it is."""
        request, body = exchange.request, exchange.request.json
        asked = body[FIELD]
        assert (asked["do_remote_decode"], asked["do_remote_prefill"]) == (True, False), asked
        assert of_one_token(request.path, body), body
        name = f"{request.headers['x-request-id']}-{next(self._numbers):08x}"
        self.held[name] = exchange.stub
        handed_over = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3], [9]],
            "remote_engine_id": exchange.stub.name,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        }
        ids = request.prompt_ids
        cached = {"cached_tokens": exchange.stub.cached_tokens(ids)}
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1, "prompt_tokens_details": cached}
        response = {"id": "x", "choices": [], "usage": usage, FIELD: handed_over}
        await exchange.whole(json.dumps(response).encode())

    async def decode(self, exchange: Exchange) -> None:
        """Fetch the prompt, and respond; compute it where nothing was handed over."""
        handed_over = exchange.request.json.get(FIELD)
        if handed_over is not None and handed_over.get("do_remote_prefill"):
            name = handed_over["remote_request_id"]
            assert self.held.pop(name).name == handed_over["remote_engine_id"]
            assert handed_over["remote_block_ids"] == [[1, 2, 3], [9]]
            self.fetched.append(name)
        await answer(exchange)


def asked_to_prefill(exchange: Exchange) -> bool:
    return bool((exchange.request.json.get(FIELD) or {}).get("do_remote_decode"))


def either(handover: Handover) -> Behaviour:
    """The behaviour of an engine that does both."""

    async def behave(exchange: Exchange) -> None:
        part = handover.prefill if asked_to_prefill(exchange) else handover.decode
        await part(exchange)

    return behave
