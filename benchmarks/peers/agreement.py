"""Does an indexer report what the engine would reuse? Ours beside Dynamo's, asked the same
questions.

    .venv-peers/bin/python -m benchmarks.peers.agreement

Recordings of real engines (`tests/conformance/streams`) are played to both over ZMQ, each at its
own socket. At every query of a recording, when both have read what came before it, both are sent
the same body, as Dynamo's `POST /query` has it, and their `longest_matched` is compared with what
the engine reused. Engines always compute the last token: of an answer that covers the whole prompt,
the last block does not count against Dynamo. One line a recording: `ours` and `theirs` are answers
that equal the engine's; one that is too high sends a request where it finds less than promised.
Hashes are sent as vLLM sends them by default, as 64-bit numbers, since Dynamo reads no others.
Queries with images, which no such body can name, are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figures import report
from benchmarks.peers.contestants import DynamoIndexer
from benchmarks.peers.programs import Answer, Connection, Missing, Replicas, build
from benchmarks.peers.publishing import Publisher
from kvevents.codec import encode
from kvevents.events import BlockStored, EventBatch
from router.cli.recordings import Header, Query, RecordingReader
from router.doors.names import worker_number
from tests.support.router_process import RouterProcess, router_process

STREAMS = Path("tests/conformance/streams")
_REPLICA = "recorded"
_SENTINELS = 3_900_000_000
"""Token ids that no recording has."""
_INSTANCES = itertools.count(1)


@dataclass
class Agreement:
    """The score of one recording."""

    queries: int = 0
    equal: int = 0
    """Both answered the same."""
    ours: int = 0
    theirs: int = 0
    theirs_too_high: int = 0
    ours_too_high: int = 0
    left_out: int = 0

    def add(self, hit: int, ours: int, theirs: int) -> None:
        self.queries += 1
        self.equal += ours == theirs
        self.ours += ours == hit
        self.theirs += theirs == hit
        self.theirs_too_high += theirs > hit
        self.ours_too_high += ours > hit


class _Ours:
    """A router with one replica that publishes the recording."""

    def __init__(self, router: RouterProcess, publisher: Publisher) -> None:
        self._connection = Connection(router.port)
        self._publisher = publisher
        self._sent = -1

    def send(self, payloads: Sequence[bytes]) -> None:
        self._publisher.send([self._publisher.messages(0, payloads)])
        self._sent += len(payloads)

    def until_read(self) -> None:
        _until(lambda: self._last_seq() >= self._sent, "ours: the last batch")

    def _last_seq(self) -> int:
        found = self._connection.ask(f"/replicas/{_REPLICA}").json()
        last: int | None = found["sources"][0]["feed"]["stream"]["last_seq"]
        return -1 if last is None else last

    def longest(self, body: dict[str, Any]) -> int:
        return _longest(self._connection.ask("/dynamo/query", body), worker_number(_REPLICA))


class _Theirs:
    """Dynamo's indexer, with one instance that publishes the recording."""

    def __init__(self, port: int, publisher: Publisher, model: str, block_size: int) -> None:
        self._connection = Connection(port)
        self._publisher = publisher
        self._model = model
        self._block_size = block_size
        self._sentinels = itertools.count(_SENTINELS, 1000)
        self._instance = next(_INSTANCES)
        body = {
            "instance_id": self._instance,
            "endpoint": publisher.endpoints[0],
            "model_name": model,
            "block_size": block_size,
        }
        answer = self._connection.ask("/register", body)
        assert answer.status in (200, 201), answer

    def send(self, payloads: Sequence[bytes]) -> None:
        self._publisher.send([self._publisher.messages(0, payloads)])

    def until_read(self) -> None:
        """Wait for a block that no other source has: the indexer does not report how far it has
        read."""
        first = next(self._sentinels)
        tokens = list(range(first, first + self._block_size))
        event = BlockStored([first], None, tokens, medium="GPU", block_size=self._block_size)
        self.send([encode(EventBatch(1.0, [event], 0))])
        body = {"model_name": self._model, "token_ids": [*tokens, 0]}
        _until(lambda: self.longest(body) > 0, "theirs: the last batch")

    def longest(self, body: dict[str, Any]) -> int:
        """Return the longest hit, without the last block where that ends the prompt."""
        found = _longest(self._connection.ask("/query", body), self._instance)
        most = (len(body["token_ids"]) - 1) // self._block_size * self._block_size
        return min(found, most)


def _longest(answer: Answer, instance: int) -> int:
    if answer.status == 404:
        return 0
    assert answer.status == 200, answer
    found = answer.json()["instances"].get(str(instance), {})
    return int(found.get("longest_matched", 0))


def _until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(0.0005)


def compared(path: Path, replica_url: str, indexer_port: int) -> Agreement:
    """Play one recording to both.

    Args:
        path: The file.
        replica_url: Of something that answers health checks.
        indexer_port: Of Dynamo's, where the recording becomes a model of its own.
    """
    found, name = Agreement(), path.name.removesuffix(".jsonl.gz")
    with RecordingReader(path) as reader, contextlib.ExitStack() as stack:
        publishers = [stack.enter_context(closing(Publisher(1))) for _ in range(2)]
        config = _config(name, reader.header, replica_url, publishers[0].endpoints[0])
        ours = _Ours(stack.enter_context(router_process(config)), publishers[0])
        theirs = _Theirs(indexer_port, publishers[1], name, reader.header.hash_block_size or 16)
        for publisher in publishers:
            publisher.wait_for_subscribers()
        unsent: list[bytes] = []
        for record in reader:
            if isinstance(record, bytes):
                unsent.append(_with_short_hashes(record))
            elif isinstance(record, Query) and record.hit is not None and record.extra_keys:
                found.left_out += 1
            elif isinstance(record, Query) and record.hit is not None:
                for side in (ours, theirs) if unsent else ():
                    side.send(unsent)
                    side.until_read()
                unsent = []
                body = _question(name, record)
                found.add(record.hit, ours.longest(body), theirs.longest(body))
    return found


def _question(model: str, query: Query) -> dict[str, Any]:
    named = {"lora_name": query.lora, "cache_salt": query.salt}
    given = {name: value for name, value in named.items() if value is not None}
    return {"model_name": model, "token_ids": query.query, **given}


def _with_short_hashes(payload: bytes) -> bytes:
    """Return the batch with the last 64 bits of every hash, as vLLM does unless told otherwise."""
    at, events, *rest = msgspec.msgpack.decode(payload)
    for event in events:
        # By name, or by position in the older form.
        is_named = isinstance(event, dict)
        there: Any = event if is_named else range(len(event))
        for key in ("block_hashes", "parent_block_hash") if is_named else (1, 2):
            if key in there:
                event[key] = _short(event[key])
    return msgspec.msgpack.encode([at, events, *rest])


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(each) for each in value]
    return int.from_bytes(value, "big") & (2**64 - 1) if isinstance(value, bytes) else value


def _config(model: str, header: Header, url: str, events: str) -> dict[str, Any]:
    """Return what an operator would write: of the layout only what no event shows."""
    hints = header.hints(learn_layout=True)
    groups = [
        {
            "kind": group.kind.value,
            "block_size": group.block_size,
            "sliding_window": group.sliding_window,
            "attention_chunk_size": group.attention_chunk_size,
        }
        for group in hints.groups
    ]
    layout = {
        "groups": groups,
        "eagle": hints.eagle if isinstance(hints.eagle, bool) else list(hints.eagle),
        "eagle_sees_last_token": hints.eagle_sees_last_token,
        "prefix_replay_tokens": hints.prefix_replay_tokens,
        "assume_unseen": hints.assume_unseen,
    }
    replica = {"id": _REPLICA, "url": url, "models": [model], "kv_events": [{"endpoint": events}]}
    return {"models": [{"name": model, "layout": layout}], "replicas": [replica]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, default=sorted(STREAMS.glob("*.jsonl.gz")))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as directory:
        try:
            build(Path(directory))
            indexer = DynamoIndexer()
        except Missing as missing:
            print(f"skipped: {missing}", file=sys.stderr)
            return 1
        with Replicas(Path(directory), 1) as replicas, closing(indexer):
            for path in options.paths:
                _compare(path, replicas.urls[0], indexer.port)
    return 0


def _compare(path: Path, replica_url: str, indexer_port: int) -> None:
    with RecordingReader(path) as reader:
        kinds = sorted({spec.kind for spec in reader.header.groups})
    found = compared(path, replica_url, indexer_port)
    name = path.name.removesuffix(".jsonl.gz")
    report("agreement", of=name, kinds=kinds, **vars(found))


if __name__ == "__main__":
    sys.exit(main())
