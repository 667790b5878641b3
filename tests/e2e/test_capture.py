"""A user checks his own engine: traffic through a router, recorded there, replayed offline."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from tests.support.actual_hits import until_told
from tests.support.engine_process import EngineProcess, engine_processes, simulated
from tests.support.router_process import RouterProcess, router_process
from tests.support.signals import reset_signal_handlers
from tests.support.vllm_publisher import VllmPublisher
from tests.support.waiting import DEADLINE_S, eventually

COMMAND = [sys.executable, "-m", "router.cli.main"]
ALLOWED = {"observability": {"allow_capture": True}}


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=reset_signal_handlers,
    )


async def finish(process: subprocess.Popen[str]) -> str:
    said, complaints = await asyncio.to_thread(process.communicate, timeout=DEADLINE_S)
    assert "Traceback" not in complaints
    return said + complaints


async def serve(router: RouterProcess, engine: EngineProcess, count: int, seed: int) -> None:
    """Prompts with common beginnings, one after another."""
    random, documents = Random(seed), Random(0)
    shared = [documents.choices(range(256), k=200) for _ in range(4)]
    for _ in range(count):
        prompt = random.choice(shared)[: random.randint(20, 200)] + random.choices(range(256), k=20)
        body = {"model": "m", "prompt": prompt, "max_tokens": 1}
        answer = await router.post("/v1/completions", body)
        assert answer.status == 200, answer.body
        await until_told(router, engine)


async def recording(router: RouterProcess, output: Path, *more: str) -> subprocess.Popen[str]:
    """A capture that has begun."""
    process = start("capture", "--url", router.url, "--output", str(output), *more)
    await eventually(lambda: has_lines(output) or process.poll() is not None, "it has begun")
    return process


def has_lines(output: Path) -> bool:
    """Not only whether it exists: it does for a moment when it is tried whether it can be made."""
    with contextlib.suppress(FileNotFoundError):
        return output.stat().st_size > 0
    return False


def named(preset: str, **options: Any) -> tuple[str, ...]:
    return simulated(preset, served_model_name="m", max_model_len=1024, **options)


@pytest.mark.parametrize("preset", ["gemma", "mamba-hybrid"])
async def test_what_a_router_records_can_be_compared_offline(preset: str, tmp_path: Path) -> None:
    """The recording starts in the middle: what was cached before is part of it."""
    output = tmp_path / "stream.jsonl.gz"
    with router_process(ALLOWED) as router:
        async with (
            engine_processes(1, *named(preset, num_blocks=300)) as (engine,),
            router.serving(engine),
        ):
            await serve(router, engine, 10, seed=1)
            process = await recording(router, output, "--queries", "20")
            # A few more: the file may be there a moment before the recording is.
            await serve(router, engine, 24, seed=2)
            said = await finish(process)
    assert f"recording {engine.name}" in said
    assert f"and 20 queries in {output}" in said
    summary = json.loads(await finish(start("replay", str(output), "--summary-only")))
    assert (summary["queries"], summary["differ"], summary["malformed"]) == (20, 0, 0)
    assert summary["hit_tokens"] > 0


async def test_prompts_are_recorded_only_where_that_is_allowed(tmp_path: Path) -> None:
    """They leave the router: it must have been asked for."""
    with router_process() as router:
        async with engine_processes(1, *named("full")) as (engine,), router.serving(engine):
            process = await recording(router, tmp_path / "s.jsonl")
            said = await finish(process)
    assert process.returncode == 2
    assert "observability.allow_capture" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["client", None])
async def test_only_operators_record(key: str | None, tmp_path: Path) -> None:
    """A client's key opens no other client's prompts."""
    keys = {"client_api_key": "client", "operator_api_key": "operator"}
    with router_process({**ALLOWED, "server": keys}) as router:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        assert (await router.get("/replicas/x/recording", headers)).status == 401


async def test_which_replica_to_record_is_asked_for(tmp_path: Path) -> None:
    """One recording is the stream of one cache."""
    output = str(tmp_path / "s.jsonl")
    with router_process(ALLOWED) as router:
        url = ("capture", "--url", router.url, "-o", output)
        assert "name one of the router's replicas: none" in await finish(start(*url))
        for name in ("b", "a b", "b\xe9"):  # also one that a path holds only in another form
            said = await finish(start(*url, "--replica", name))
            assert f"no replica has the id {name!r}" in said
    assert list(tmp_path.iterdir()) == []


async def test_a_recording_ends_with_its_replica_and_with_the_router(tmp_path: Path) -> None:
    """Neither waits for it."""
    with router_process(ALLOWED) as router:
        async with engine_processes(1, *named("full")) as (engine,):
            async with router.serving(engine):
                first = await recording(router, tmp_path / "first.jsonl")
            assert "ends here: the replica was removed" in await finish(first)
            async with router.serving(engine):
                second = await recording(router, tmp_path / "second.jsonl")
                router.stop()
            assert "ends here: the router is shutting down" in await finish(second)


async def test_there_are_few_recordings_at_a_time(tmp_path: Path) -> None:
    """Each costs the router memory; one that has ended makes room."""
    with router_process(ALLOWED) as router:
        async with engine_processes(1, *named("full")) as (engine,), router.serving(engine):
            paths = [tmp_path / f"{number}.jsonl" for number in range(4)]
            processes = [await recording(router, path) for path in paths]
            refused = await router.get(f"/replicas/{engine.name}/recording")
            assert (refused.status, refused.json["error"]["code"]) == (409, "not_recordable")
            for process in processes:
                process.send_signal(signal.SIGINT)
                await finish(process)
            again = await recording(router, tmp_path / "again.jsonl", "--seconds", "1")
            await finish(again)
    assert (tmp_path / "again.jsonl").exists()


# --- from a publisher -----------------------------------------------------------------------------


async def test_a_recording_of_a_running_engine_begins_with_its_snapshot(tmp_path: Path) -> None:
    """Its ring has long forgotten how the cache came to be."""
    output, process_name = tmp_path / "stream.jsonl", bytes(range(16))
    state, later = (msgspec.msgpack.encode([0.0, [], 0, what]) for what in ("state", process_name))

    def snapshot(publisher: VllmPublisher) -> list[bytes]:
        return [b"", publisher.last_seq.to_bytes(8, "big", signed=True), process_name, state]

    with VllmPublisher(ring=5, snapshots=snapshot) as publisher:
        for _ in range(100):
            publisher.publish(later)
        publisher.flush()
        process = start(
            *("capture", "--endpoint", publisher.endpoint, "-o", str(output), "--batches", "2"),
            *("--snapshot-endpoint", publisher.snapshot_endpoint),
        )
        await eventually(lambda: has_lines(output) or process.poll() is not None, "the snapshot")
        await eventually(lambda: publisher.subscribers, "the subscription")
        publisher.publish(later)
        assert f"2 batches in {output}" in await finish(process)
    _header, *lines = output.read_text().splitlines()
    frames = [base64.b64decode(json.loads(line)["frame"]) for line in lines]
    assert frames == [state, later]


# --- nothing to record ----------------------------------------------------------------------------


async def test_a_dead_port_is_reported_and_leaves_no_file(tmp_path: Path) -> None:
    """A capture of nothing looks like one of a quiet engine otherwise."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        arguments = ("--endpoint", endpoint, "-o", str(tmp_path / "s.jsonl"), "--seconds", "3")
        process = start("capture", *arguments)
        said = await finish(process)
    assert process.returncode == 1
    assert f"capture: no process listens at {endpoint}; still waiting" in said
    assert f"0 batches: no process listens at {endpoint}" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("endpoint", ["foo", "tcp://*:5557"])
async def test_an_error_leaves_no_file_and_spares_an_earlier_one(
    endpoint: str, tmp_path: Path
) -> None:
    """A typing error must not cost the last recording."""
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text("recorded before\n")
    for output in (earlier, tmp_path / "new.jsonl"):
        process = start("capture", "--endpoint", endpoint, "-o", str(output))
        assert "kvroute: " in await finish(process)
        assert process.returncode == 2
    assert [path.read_text() for path in tmp_path.iterdir()] == ["recorded before\n"]
