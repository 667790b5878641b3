"""Hostile requests, generated from a seed: bodies that are nearly right, and bytes that are nearly
HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

SENTINEL = "prompt-sentinel-e6b1c0"
"""Part of every prompt; it must not appear in any log or error."""

NASTY_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**64,
    10**400,
    -(2**63),
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "\x00",
    "\ud800",
    "\U0001f600" * 50,
    "x" * 5000,
    [],
    {},
    [[]],
    [None],
    [[1, 2], "x"],
    {"type": "image_url", "image_url": {"url": "data:,x"}},
    ["a"] * 300,
    {str(index): index for index in range(100)},
)
NASTY_BYTES = (
    b"\x00",
    b"\xff",
    b"\r\n",
    b"{",
    b"}",
    b"[" * 50,
    b'"',
    b"\\u",
    b"\\ud800",
    b"1e999",
    b"-",
    b",",
    b"\xef\xbb\xbf",
)
NASTY_LINES = (
    b"content-length: 5\r\n",
    b"content-length: -1\r\n",
    b"content-length: 99999999999999999999\r\n",
    b"content-length: 0x10\r\n",
    b"Content-Length: 5, 5\r\n",
    b"transfer-encoding: chunked\r\n",
    b"transfer-encoding: gzip, chunked\r\n",
    b"transfer-encoding: chunked, identity\r\n",
    b"transfer-encoding:\r\n",
    b"connection: close\r\n",
    b"connection: upgrade\r\nupgrade: websocket\r\n",
    b"expect: 100-continue\r\n",
    b"expect: the-unexpected\r\n",
    b" folded: yes\r\n",
    b"x: a\r\n b\r\n",
    b": nameless\r\n",
    b"na me: x\r\n",
    b"x\x00y: z\r\n",
    b"x: \x00\x01\x7f\r\n",
    b"x: \xff\xfe\r\n",
    b"x-request-id: \xff\t\xfe\r\n",
    b"x-session-id: \xff\r\n",
    b"authorization: Bearer \xff\r\n",
    b"host: a\r\nhost: b\r\n",
    b"content-type: application/msgpack\r\n",
    b"accept: application/msgpack\r\n",
    b"content-encoding: gzip\r\n",
    b"x-data-parallel-rank: 999999999\r\n",
)
NASTY_TARGETS = (
    b"*",
    b"/",
    b"//",
    b"/../../etc/passwd",
    b"/v1/completions/",
    b"/v1/%63ompletions",
    b"/v1/completions%00",
    b"/v1/completions?\xff",
    b"/v1/completions?%0d%0ax:y",
    b"/v1/completions#x",
    b"http://elsewhere/v1/completions",
    b"elsewhere:443",
    b"/replicas/%2e%2e/drain",
    b"/replicas/" + b"x" * 3000,
    b"/" + b"%41" * 1000,
)
METHODS = (
    b"POST",
    b"GET",
    b"PUT",
    b"DELETE",
    b"HEAD",
    b"OPTIONS",
    b"CONNECT",
    b"TRACE",
    b"PATCH",
    b"PRI",
    b"post",
    b"\x16\x03\x01",
)

Mutation = Callable[[Random, bytes], bytes]


def seeds(model: str) -> dict[str, list[Any]]:
    """Valid bodies, by path."""
    text = f"{SENTINEL} tell me more"
    messages = [
        {"role": "system", "content": text},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": text},
                {"type": "image_url", "image_url": {"url": "data:,"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": text},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    extras = {
        "stream": False,
        "n": 2,
        "cache_salt": "salt",
        "vllm_xargs": {"kv_cache_report_mode": "full"},
        "user": "u",
    }
    return {
        "/v1/completions": [
            {"model": model, "prompt": [1, 2, 3], **extras},
            {"model": model, "prompt": [[1, 2], [3]], "truncate_prompt_tokens": 2},
            {"model": model, "prompt": [[1], text], "prompt_embeds": None},
        ],
        "/v1/chat/completions": [{"model": model, "messages": messages, "tools": tools, **extras}],
        "/v1/messages": [
            {
                "model": model,
                "max_tokens": 5,
                "system": text,
                "messages": messages[1:2],
                "tools": tools,
            }
        ],
        "/v1/responses": [
            {"model": model, "input": messages[:2], "instructions": text, "tools": tools}
        ],
        "/v1/embeddings": [
            {"model": model, "input": [text, text]},
            {"model": model, "input": [1, 2]},
        ],
        "/tokenize": [{"model": model, "prompt": text}],
        "/route": [
            {"model": model, "token_ids": [1, 2, 3], "lora_name": None},
            {"model": model, "messages": messages},
        ],
        "/replicas": [
            {
                "url": "ftp://nowhere",
                "id": SENTINEL,
                "kv_events": [{"endpoint": "tcp://x:1"}],
                "api_key": SENTINEL,
            }
        ],
    }


# --- bodies ---------------------------------------------------------------------------------------


def mutated_body(random: Random, seed: Any) -> bytes:
    """A body that is nearly right, in its values or in its bytes."""
    if random.random() < 0.5:
        return json.dumps(_with_nasty_value(random, seed)).encode("utf-8", "surrogatepass")
    return mutated_bytes(random, json.dumps(seed).encode())


def _with_nasty_value(random: Random, seed: Any) -> Any:
    """The same structure with one value, anywhere, replaced, renamed or removed."""
    whole = json.loads(json.dumps(seed))
    place, key = random.choice(_places(whole))
    choice = random.random()
    if choice < 0.7:
        place[key] = random.choice(NASTY_VALUES)
    elif choice < 0.85 or isinstance(place, list):
        del place[key]
    else:
        place[key + random.choice(("", "x", "\x00"))] = place.pop(key)
    return whole


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside."""
    keys = (
        range(len(value))
        if isinstance(value, list)
        else list(value)
        if isinstance(value, dict)
        else ()
    )
    here = [(value, key) for key in keys]
    return here + [place for key in keys for place in _places(value[key])]


def mutated_bytes(random: Random, data: bytes) -> bytes:
    """Make up to four small changes."""
    for _ in range(random.randint(1, 4)):
        data = random.choice(_BYTE_MUTATIONS)(random, data)
    return data


def _flip(random: Random, data: bytes) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]


def _cut(random: Random, data: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _drop(random: Random, data: bytes) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + data[at + random.randint(1, 8) :]


def _repeat(random: Random, data: bytes) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + data[at : at + 20] * random.randint(2, 20) + data[at:]


def _insert(random: Random, data: bytes) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.choice(NASTY_BYTES) + data[at:]


_BYTE_MUTATIONS: tuple[Mutation, ...] = (_flip, _cut, _drop, _repeat, _insert)


# --- whole requests -------------------------------------------------------------------------------


def mutated_request(random: Random, target: str, body: bytes) -> bytes:
    """Bytes that are nearly an HTTP request; a connection that was sent them may only be read to
    its end."""
    method = random.choice(METHODS) if random.random() < 0.1 else b"POST"
    path = random.choice(NASTY_TARGETS) if random.random() < 0.15 else target.encode()
    lines = [b"host: x\r\n", *random.sample(NASTY_LINES, random.choice((0, 0, 1, 1, 2, 3)))]
    if random.random() < 0.5:
        lines.append(
            b"content-length: %d\r\n" % (len(body) + random.choice((0, 0, 0, 0, 0, 1, -1)))
        )
        content = body
    else:
        lines.append(b"transfer-encoding: chunked\r\n")
        content = chunked(random, body)
    random.shuffle(lines)
    whole = method + b" " + path + b" HTTP/1.1\r\n" + b"".join(lines) + b"\r\n" + content
    return mutated_bytes(random, whole) if random.random() < 0.3 else whole


def chunked(random: Random, body: bytes) -> bytes:
    """A chunked body, with sizes, extensions and ends that may lie."""
    parts = []
    while body:
        size = random.randint(1, len(body))
        shown = random.choice(
            (b"%x", b"%X", b"00%x") * 10 + (b"%x;a=b", b'%x;a="\x00"', b"0x%x", b"-%x", b"%x ")
        )
        wrong = random.choice((0,) * 20 + (1, -1, 2**40))
        parts.append(
            shown % (max(size + wrong, 0))
            + random.choice((b"\r\n",) * 20 + (b"\n",))
            + body[:size]
            + b"\r\n"
        )
        body = body[size:]
    return b"".join(parts) + random.choice(
        (b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"0\r\n", b"")
    )
