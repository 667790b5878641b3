"""The commands that talk to running engines and routers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvevents.publisher import RecordedStreamPublisher
from kvevents.publisher_config import PublisherConfig
from router.recording import Query, RecordingReader
from tests.support.engine_stub import engines
from tests.support.router_process import router_process

STREAM = Path(__file__).parents[1] / "conformance" / "streams" / "real_full.jsonl.gz"


def kvroute(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def frames(path: Path) -> list[bytes]:
    with RecordingReader(path) as reader:
        return [record for record in reader if not isinstance(record, Query)]


@pytest.mark.parametrize("name", ["stream.jsonl", "stream.jsonl.gz"])
def test_a_captured_stream_is_what_was_published_and_can_be_replayed(tmp_path: Path, name: str) -> None:
    """A user records an engine of theirs to see what the index makes of it."""
    published = frames(STREAM)[:40]
    config = PublisherConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    with RecordedStreamPublisher(config) as publisher:
        for payload in published:
            publisher.publish_raw(payload)
        output = tmp_path / name
        addresses = ["--endpoint", publisher.endpoint, "--replay-endpoint", str(publisher.replay_endpoint)]
        done = kvroute("capture", *addresses, "--output", str(output), "--batches", "40", "--seconds", "30", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["batches"] == 40
    assert frames(output) == published
    summary = json.loads(kvroute("replay", str(output)).stdout)
    assert (summary["frames"], summary["malformed"]) == (40, 0)


def test_an_engine_that_says_nothing_gives_an_empty_recording_and_a_failure(tmp_path: Path) -> None:
    """A script must notice that it recorded nothing."""
    with RecordedStreamPublisher(PublisherConfig(endpoint="tcp://127.0.0.1:0")) as publisher:
        done = kvroute("capture", "--endpoint", publisher.endpoint, "--output", str(tmp_path / "s.jsonl"), "--seconds", "0.5")
    assert done.returncode == 1
    assert "0 batches" in done.stdout


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "http://127.0.0.1:5557", "nonsense"])
def test_an_address_nobody_can_connect_to_is_refused_at_once(tmp_path: Path, endpoint: str) -> None:
    """The message names the address and the rule."""
    done = kvroute("capture", "--endpoint", endpoint, "--output", str(tmp_path / "s.jsonl"), "--seconds", "5")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("kvroute: ")
    assert "Traceback" not in done.stderr


async def test_the_route_command_shows_where_a_prompt_would_go_and_why() -> None:
    """The question an operator asks first."""
    with router_process({}) as router:
        async with engines(2, has_events=True) as stubs, router.serving(*stubs):
            ids = list(range(500, 580))
            stubs[1].store(ids)
            await router.until_applied(stubs[1])
            asked = ["route", "--url", router.url, "--model", stubs[1].model, "--token-ids", json.dumps([*ids, 7])]
            found = await asyncio.to_thread(kvroute, *asked, "--json")
            shown = await asyncio.to_thread(kvroute, *asked)
            wrong = await asyncio.to_thread(kvroute, "route", "--url", router.url, "--model", "nobody", "--token-ids", "1")
    answer = json.loads(found.stdout)
    assert (answer["replica"], answer["ranking"][0]["hit"]["gpu"]) == (stubs[1].name, 80)
    assert "80" in shown.stdout
    assert (wrong.returncode, "status 404" in wrong.stderr) == (2, True)
