"""The demo's play: recorded engines publish, their recorded prompts go through a real router, predictions meet the truth."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from router.demo.replica import MODEL, RecordedReplica
from router.demo.score import ReplicaScore, Score
from router.errors import RouterError
from router.recording import Query
from router.upstream import Origin, Timeouts, UpstreamClient, UpstreamError

_TIMEOUTS = Timeouts(connect_s=5, first_byte_s=10, idle_s=10)
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_JSON = ((b"content-type", b"application/json"),)
_START_S = 30.0
_CATCH_UP_S = 10.0


class DemoFailed(RouterError):
    """The demo could not go on; the message says what did not happen."""


class RouterClient:
    """The demo's side of the router: asks and sends, as any client does."""

    def __init__(self, url: str) -> None:
        self._origin = Origin.parse(url)
        self._client = UpstreamClient()

    async def close(self) -> None:
        await self._client.close()

    async def get(self, path: str) -> Any:
        """The answer to a GET, decoded."""
        status, _, body = await self._client.fetch(self._origin, b"GET", path.encode(), b"", _TIMEOUTS, _MAX_ANSWER_BYTES)
        if status != 200:
            raise DemoFailed(f"GET {path}: status {status}")
        return msgspec.json.decode(body)

    async def post(self, path: str, value: Any) -> tuple[dict[bytes, bytes], Any]:
        """Headers and decoded answer of a POST."""
        status, headers, body = await self._client.fetch(
            self._origin, b"POST", path.encode(), msgspec.json.encode(value), _TIMEOUTS, _MAX_ANSWER_BYTES, _JSON
        )
        if status != 200:
            raise DemoFailed(f"POST {path}: status {status}: {body[:200].decode(errors='replace')}")
        return dict(headers), msgspec.json.decode(body)


async def play(recordings: Sequence[Path], show: Callable[[Score], None], max_queries: int | None) -> Score:
    """Run everything; *show* is called whenever the score changes.

    Raises:
        DemoFailed: The router did not start, or did not catch up with the events.
    """
    replicas = [RecordedReplica(f"replica-{number}", path) for number, path in enumerate(recordings, 1)]
    score = Score({replica.name: ReplicaScore(replica.recording.name.removesuffix(".jsonl.gz")) for replica in replicas})
    for replica in replicas:
        await replica.start()
    try:
        async with _router(replicas) as client:
            await _play_all(client, replicas, score, show, max_queries)
    finally:
        for replica in replicas:
            await replica.stop()
    return score


async def _play_all(
    client: RouterClient,
    replicas: Sequence[RecordedReplica],
    score: Score,
    show: Callable[[Score], None],
    max_queries: int | None,
) -> None:
    plays = [(replica, replica.play()) for replica in replicas]
    while plays and (max_queries is None or score.queries < max_queries):
        for replica, queries in list(plays):
            query = next(queries, None)
            if query is None:
                plays.remove((replica, queries))
                continue
            await _wait_until_applied(client, replica, score)
            await _ask_and_send(client, replica, query, score)
            show(score)


async def _wait_until_applied(client: RouterClient, replica: RecordedReplica, score: Score) -> None:
    """The truth of a query holds after the events before it, so the router must have seen them."""
    deadline = time.monotonic() + _CATCH_UP_S
    while True:
        source = (await client.get(f"/replicas/{replica.name}"))["sources"][0]
        last = source["feed"]["stream"]["last_seq"]
        if (-1 if last is None else last) == replica.published - 1:
            break
        if time.monotonic() > deadline:
            raise DemoFailed(f"{replica.name}: the router saw batch {last} of {replica.published - 1} within {_CATCH_UP_S} s")
        await asyncio.sleep(0.002)
    found = score.replicas[replica.name]
    found.batches = replica.published
    found.blocks = {f"{entry['group']}/{entry['tier']}": entry["blocks"] for entry in source["cache"]["blocks"]}


async def _ask_and_send(client: RouterClient, replica: RecordedReplica, query: Query, score: Score) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": query.query, "max_tokens": 1}
    if query.salt:
        request["cache_salt"] = query.salt
    _, route = await client.post("/route", request)
    predicted = next(entry["hit"]["total"] for entry in route["ranking"] if entry["replica"] == replica.name)
    score.replicas[replica.name].add(predicted, query.hit)
    headers, answer = await client.post("/v1/completions", request)
    served_by = headers[b"x-kv-replica"].decode()
    score.replicas[served_by].sent_here += 1
    score.with_hit += query.hit > 0
    score.to_holder += query.hit > 0 and served_by == replica.name
    score.answers_compared += 1
    score.answers_exact += int(headers[b"x-kv-hit-tokens"]) == answer["usage"]["prompt_tokens_details"]["cached_tokens"]


# --- the router -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _router(replicas: Sequence[RecordedReplica]) -> AsyncIterator[RouterClient]:
    """A router process that knows nothing of the replicas but their URLs."""
    with tempfile.TemporaryDirectory(prefix="kvroute-demo-") as directory:
        config = Path(directory) / "kvroute.yaml"
        config.write_text(_configuration(replicas))
        command = [sys.executable, "-m", "router.cli.main", "serve", "--config", str(config)]
        process = await asyncio.create_subprocess_exec(
            *command, stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
        try:
            client = RouterClient(await _announced_url(process))
            drain = asyncio.create_task(_drain(process))
            try:
                await _wait_until_ready(client, len(replicas))
                yield client
            finally:
                await client.close()
        finally:
            await _end(process)
        await drain


def _configuration(replicas: Sequence[RecordedReplica]) -> str:
    lines = [
        "server: {port: 0}",
        "health: {interval_s: 0.5, timeout_s: 0.5}",
        "observability: {log_level: warning}",
        "replicas:",
    ]
    lines += [f"  - {{id: {replica.name}, url: '{replica.url}'}}" for replica in replicas]
    return "\n".join(lines) + "\n"


async def _announced_url(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    said = b""
    while line := await asyncio.wait_for(process.stderr.readline(), _START_S):
        if b"listens on" in line:
            return line.split()[-1].decode()
        said += line
    raise DemoFailed(f"the router did not start: {said[-2000:].decode(errors='replace')}")


async def _drain(process: asyncio.subprocess.Process) -> None:
    """Pass on what the router says, so that its pipe never fills."""
    assert process.stderr is not None
    while line := await process.stderr.readline():
        sys.stderr.buffer.write(line)


async def _wait_until_ready(client: RouterClient, count: int) -> None:
    deadline = time.monotonic() + _START_S
    while not await _all_live(client, count):
        if time.monotonic() > deadline:
            raise DemoFailed(f"{count} replicas were not all live within {_START_S} s")
        await asyncio.sleep(0.05)


async def _all_live(client: RouterClient, count: int) -> bool:
    try:
        replicas = (await client.get("/replicas"))["replicas"]
    except UpstreamError:
        return False
    feeds = [source["feed"] for replica in replicas if replica["state"] == "healthy" for source in replica["sources"]]
    return len(feeds) == count and all(feed and feed["state"] == "live" for feed in feeds)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.wait(), _START_S)
