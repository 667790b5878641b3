"""The tokenizers of the replicas: which one is asked for token ids, and do they agree with ours?

A router whose tokenizer differs from the engine's, by one token at the front, predicts hits that
never happen, and nothing else would show why. The usual causes: another version of the model's
files, a chat template given on the engine's command line, a BOS token that only one of them adds, a
version of transformers that rebuilds Llama's tokenizer instead of reading it. So each replica is
asked whenever it becomes healthy.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from async_timeout import timeout

from router.config.origin import Timeouts
from router.errors import NoReplica
from router.fleet.client import UpstreamClient
from router.fleet.client_errors import OutOfResources, UpstreamError
from router.fleet.load import LoadTracker
from router.fleet.registry import ReplicaRegistry
from router.fleet.replica import Replica
from router.fleet.types import ReplicaState
from router.prompt.body.requests import read_model
from router.prompt.body.sglang_request import as_sglang_chat
from router.prompt.body.splicing import with_model
from router.prompt.errors import ReplicaAnswerError, UntokenizableError
from router.prompt.local.tokenizer import LocalTokenizer
from router.prompt.prompts import ChatPrompt, TextPrompt
from router.prompt.remote import RemoteTokenizer

logger = logging.getLogger(__name__)

MAX_ASKED = 2
"""Replicas that are asked for one prompt. Beyond that it is routed by load, which costs a hit, not
a response."""
AVOIDED_S = 5.0
"""For this long a replica that did not respond is asked last: otherwise each prompt would wait for
it, until its health checks have failed."""
_BYTES_PER_S = 1_000_000
"""The rate of a slow tokenizer: a longer body is given more time."""
_RESPONSE_BYTES = 32 * 1024 * 1024
_HEADERS = ((b"content-type", b"application/json"),)


@dataclass(eq=False, repr=False)
class ReplicaTokenizers:
    """The `/tokenize` endpoints of the replicas. Belongs to one event loop."""

    upstream: UpstreamClient
    registry: ReplicaRegistry
    load: LoadTracker
    tokenize_s: float
    """Time for one replica to tokenise a short prompt, while a request waits."""
    patient: Timeouts
    clock: Callable[[], float] = time.monotonic
    """A monotonic clock, in seconds."""

    def __post_init__(self) -> None:
        self._turn = itertools.count()
        self._last_turn: WeakKeyDictionary[Replica, int] = WeakKeyDictionary()
        self._failed_at: WeakKeyDictionary[Replica, float] = WeakKeyDictionary()

    async def ask(self, replica: Replica, path: str, body: bytes) -> tuple[int, bytes]:
        """POST to one replica, patiently; return status and body.

        Raises:
            ConnectionError: It does not respond.
        """
        try:
            return await self._post(replica, path, body, self.patient)
        except UpstreamError as error:
            raise ConnectionError(error) from error

    async def ask_one_of(self, names: Sequence[str], path: str, body: bytes) -> tuple[int, bytes]:
        """POST to the least busy replica, and to another one if it does not respond in time.

        Args:
            names: A model's; replicas that serve it by one of them are asked.
        Returns:
            Status and body.
        Raises:
            ConnectionError: None responded, or none is healthy.
        """
        failure: Exception = NoReplica(names[0], "none is healthy")
        for replica in self._order(names)[:MAX_ASKED]:
            self._last_turn[replica] = next(self._turn)
            try:
                with self.load.tokenizing(replica.id):
                    renamed = body if len(names) == 1 else _as_called_at(replica, names, body)
                    status, response = await self._ask_in_time(replica, path, renamed)
            except OutOfResources as error:
                raise ConnectionError(error) from error
            except (UpstreamError, asyncio.TimeoutError) as error:
                failure = error
                self._failed_at[replica] = self.clock()
                continue
            if status < 500:
                self._failed_at.pop(replica, None)
                return status, response
            failure = ConnectionError(f"{replica.origin}: POST {path} returned {status}")
            self._failed_at[replica] = self.clock()
        raise ConnectionError(failure) from failure

    def _order(self, names: Sequence[str]) -> list[Replica]:
        """Return the replicas that can be asked: the least busy first, of equal ones the longest
        unasked."""
        now = self.clock()

        def key(replica: Replica) -> tuple[bool, int, int]:
            load = self.load.load_of(replica.id)
            failed_at = self._failed_at.get(replica)
            return (
                failed_at is not None and now - failed_at < AVOIDED_S,
                load.requests + load.tokenizing_requests,
                self._last_turn.get(replica, -1),
            )

        return sorted(self._able(names), key=key)

    def _able(self, names: Sequence[str]) -> Iterable[Replica]:
        found = {replica: None for name in names for replica in self.registry.serving(name)}
        return (replica for replica in found if replica.state is ReplicaState.HEALTHY)

    async def _ask_in_time(self, replica: Replica, path: str, body: bytes) -> tuple[int, bytes]:
        limit_s = self.tokenize_s + len(body) / _BYTES_PER_S
        async with timeout(limit_s):
            return await self._post(replica, path, body, Timeouts(limit_s, limit_s, limit_s))

    async def _post(
        self, replica: Replica, path: str, body: bytes, timeouts: Timeouts
    ) -> tuple[int, bytes]:
        headers = *_HEADERS, *replica.headers
        return await self.upstream.fetch(
            replica.origin, path.encode(), timeouts, _RESPONSE_BYTES, headers, b"POST", body
        )


# --- do they tokenise as the router does? ---------------------------------------------------------

_TEXT = "The answer is 42.\n\n  Isn't it?\tна́йден 日本語 🙂"
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
        },
    },
}
_USER = {"role": "user", "content": _TEXT}
_TURNS = [
    {"role": "system", "content": "Be brief."},
    _USER,
    {"role": "assistant", "content": "Yes."},
    _USER,
]


def _chat(messages: list[dict[str, str]], **fields: Any) -> ChatPrompt:
    return ChatPrompt(messages, **fields, sent={"messages": messages, **fields})


_PROBES: dict[str, TextPrompt | ChatPrompt] = {
    "text": TextPrompt(_TEXT),
    # Where SentencePiece models differ by the age of the library that converted them.
    "text after a blank": TextPrompt("  " + _TEXT),
    "text without special tokens": TextPrompt(_TEXT, add_special_tokens=False),
    "one message": _chat([_USER]),
    "several turns": _chat(_TURNS),
    "tools": _chat([_USER], tools=[_TOOL]),
}


def _as_called_at(replica: Replica, names: Sequence[str], body: bytes) -> bytes:
    """A body that names a model, by one of its *names* that the replica knows."""
    model, _ = read_model(body)
    if model is None or model not in names or replica.serves(model):
        return body
    return with_model(body, next((name for name in names if replica.serves(name)), model))


class TokenizerCheck:
    """Runs the checks and keeps their results. Belongs to one event loop.

    Args:
        ask: `(replica, path, body) -> (status, body)`; raises OSError or TimeoutError where the
            replica does not respond.
    """

    def __init__(self, ask: Callable[[Replica, str, bytes], Awaitable[tuple[int, bytes]]]) -> None:
        self._ask = ask
        self._running: set[asyncio.Task[None]] = set()
        self.disagreements: dict[tuple[str, str], int] = {}
        """(model, replica) -> probes tokenised differently; absent where that is not known."""
        self._writes_harmony: dict[tuple[str, str], bool] = {}
        """(model, replica) -> whether that is proved, of gpt-oss's replicas."""

    def start(self, replica: Replica, model: str, local: LocalTokenizer) -> None:
        """Check in the background whether a replica tokenises as the router does."""
        if local.is_harmony:
            self._writes_harmony[model, replica.id] = False
        task = asyncio.get_running_loop().create_task(
            self._check(replica, model, local), name=f"tokenizer {replica.id}"
        )
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def forget(self, replica_id: str) -> None:
        self.disagreements = {
            key: count for key, count in self.disagreements.items() if key[1] != replica_id
        }
        for key in [key for key in self._writes_harmony if key[1] == replica_id]:
            del self._writes_harmony[key]

    def all_write_harmony(self, model: str) -> bool:
        """Return whether all replicas of a model are known to write its chats in harmony format
        where they are asked for token ids."""
        known = [proved for key, proved in self._writes_harmony.items() if key[0] == model]
        return bool(known) and all(known)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    async def _check(self, replica: Replica, model: str, local: LocalTokenizer) -> None:
        async def fetch(path: str, body: bytes) -> tuple[int, bytes]:
            return await self._ask(replica, path, body)

        served = replica.served.models[0] if replica.served.models else model
        remote = RemoteTokenizer(fetch)
        try:
            found = await find_disagreements(
                local, remote, served, is_sglang=replica.is_of("sglang")
            )
            proved = local.is_harmony and await writes_harmony(remote, served)
        except (ReplicaAnswerError, OSError, asyncio.TimeoutError) as error:
            logger.info(
                "replica %s: its tokenizer could not be compared (%s)",
                replica.id,
                type(error).__name__,
            )
            return
        self.disagreements[model, replica.id] = len(found)
        if (model, replica.id) in self._writes_harmony:
            self._writes_harmony[model, replica.id] = proved
        if found:
            names = ", ".join(found)
            logger.warning(
                "replica %s tokenises %s differently: hits will be mispredicted (%s)",
                replica.id,
                model,
                names,
            )


async def find_disagreements(
    local: LocalTokenizer,
    remote: RemoteTokenizer,
    model: str | None,
    *,
    is_sglang: bool = False,
) -> list[str]:
    """Tokenise the probes on both sides; return the names of those that come out differently.

    Probes that one side cannot tokenise are left out.

    Args:
        model: The model's name at the replica; None asks for its default.
        is_sglang: True to write chats as SGLang does.
    Raises:
        ReplicaAnswerError: The replica refused, or its response makes no sense.
        OSError: The replica did not respond; asyncio.TimeoutError likewise.
    """
    found: list[str] = []
    for name, probe in _PROBES.items():
        prompt = probe
        if is_sglang and isinstance(probe, ChatPrompt):
            prompt = as_sglang_chat(probe)
        try:
            here = local.finish(local.prepare(prompt, None))
            there = await remote.tokenize(prompt, model=model, cache_salt=None)
        except UntokenizableError:
            continue
        if here != there:
            found.append(name)
    return found


async def writes_harmony(remote: RemoteTokenizer, model: str | None) -> bool:
    """Return whether a replica writes gpt-oss's chats in harmony format for `/tokenize`, which
    takes no effort from the template's arguments. Before vLLM 0.33 it uses the template, which
    does.

    Raises:
        ReplicaAnswerError: As `find_disagreements`; OSError and asyncio.TimeoutError likewise.
    """
    low, high = [
        await remote.tokenize(
            ChatPrompt([_USER], template_arguments={"reasoning_effort": effort}),
            model=model,
            cache_salt=None,
        )
        for effort in ("low", "high")
    ]
    return low == high
