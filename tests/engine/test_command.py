"""`kvroute engine` as a process: output, exit, refused options, faults."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.http.test_tokenizer import write_tokenizer
from tests.offload import tier_plug_in
from tests.support.actual_hits import cached_tokens
from tests.support.engine_process import EngineProcess, engine_processes, simulated
from tests.support.http_client import HttpClient, connect
from tests.support.waiting import DEADLINE_S
from tests.support.warm_start import COMMAND

ROOT = Path(__file__).parents[3]


def kvroute(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; *path* precedes Python's own search path."""
    paths = [str(path)] if path else []
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "router.cli.main", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environ
    )


async def test_an_engine_serves_until_a_signal() -> None:
    """Health, a chat, its metrics, a clean exit."""
    async with engine_processes(
        1,
        *simulated(
            "gptoss", served_model_name="mine", lora="adapter", scheduling_policy="priority"
        ),
    ) as (engine,):
        assert (await engine.get("/health")).status == 200
        assert [entry["id"] for entry in (await engine.get("/v1/models")).json["data"]] == [
            "mine",
            "adapter",
        ]
        assert (await engine.get("/server_info")).json["scheduling_policy"] == "priority"
        (source,) = (await engine.get("/kv_event_sources")).json.values()
        assert source["endpoint"].startswith("tcp://127.0.0.1:")
        assert not source["endpoint"].endswith(":0")
        body = {
            "model": "mine",
            "messages": [{"role": "user", "content": "hello " * 20}],
            "max_tokens": 5,
            "ignore_eos": True,
        }
        found = (await engine.post("/v1/chat/completions", body)).json
        assert (found["choices"][0]["finish_reason"], found["usage"]["completion_tokens"]) == (
            "length",
            5,
        )
        metrics = await engine.metrics()
        assert metrics.sum("vllm:generation_tokens_total", model_name="mine", engine="0") == 5
        assert metrics.sum("vllm:cache_config_info", block_size="16", num_gpu_blocks="512") == 1


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_signal_lets_requests_finish_and_a_second_one_does_not(signals: int) -> None:
    """New requests are refused, so a router sends them elsewhere."""
    async with (
        engine_processes(1, *simulated(step_overhead_s=0.01)) as (engine,),
        connect(engine.port) as client,
    ):
        async with connect(engine.port) as other:
            await other.ask("GET", "/health")  # a connection that is there when it stops listening
            body = {
                "prompt": "x",
                "max_tokens": 100 if signals == 1 else 3000,
                "ignore_eos": True,
                "stream": True,
            }
            await client.send("POST", "/v1/completions", body)
            await client.read_head()
            await client.read_piece()
            engine.tell_to_stop()
            if signals == 1:
                assert (await client.read_body()).endswith(b"data: [DONE]\n\n")
            else:
                assert await other.is_closed()
                engine.tell_to_stop()
                assert await client.is_closed()
            assert await engine.ended() == 0
        assert "Traceback" not in engine.log()


async def test_a_crash_takes_the_process_with_it_and_a_restart_has_a_new_cache() -> None:
    """As after a fault in native code, without a goodbye; then it is back at the same address."""
    async with engine_processes(1, *simulated(enable_faults=True)) as (engine,):
        body = {"prompt": list(range(100)), "max_tokens": 1}
        await engine.post("/v1/completions", body)
        assert (await engine.post("/v1/completions", body)).json["usage"][
            "prompt_tokens_details"
        ] == {"cached_tokens": 96}
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await engine.post("/faults", {"kind": "crash"})
        assert await engine.ended() == 1
        port = engine.port
        await asyncio.to_thread(engine.start)
        assert engine.port == port
        assert (await engine.post("/v1/completions", body)).json["usage"][
            "prompt_tokens_details"
        ] == {"cached_tokens": 0}


async def test_a_restart_on_demand_is_another_engine_at_the_same_address() -> None:
    """For tests of routers: the same process to its supervisor, a new cache and event stream."""
    async with engine_processes(1, *simulated("gemma", num_blocks=300, enable_faults=True)) as (
        engine,
    ):
        body = {"model": "gemma", "prompt": [*range(1, 100)], "max_tokens": 2}
        hits = [cached_tokens(await engine.post("/v1/completions", body)) for _ in range(2)]
        process = engine.process.pid
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await engine.post("/faults", {"kind": "restart"})
        await engine.until_healthy()
        hits.append(cached_tokens(await engine.post("/v1/completions", body)))
        assert hits == [0, 96, 0]
        assert (engine.process.pid, engine.process.poll()) == (process, None)


async def test_an_engine_that_hangs_can_be_stopped() -> None:
    """Its grace period ends."""
    async with engine_processes(1, *simulated(enable_faults=True, grace_s=1)) as (engine,):
        assert (await engine.post("/faults", {"kind": "hang", "seconds": 3600})).status == 200
        asking = asyncio.ensure_future(engine.post("/v1/completions", {"prompt": "x"}))
        await eventually_waiting(engine)
        engine.tell_to_stop()
        assert await engine.ended() == 0
        await asyncio.wait([asking])
        assert asking.exception() is not None, "the connection was cut"
        assert "Traceback" not in engine.log()


async def eventually_waiting(engine: EngineProcess) -> None:
    while (await engine.metrics()).sum("vllm:num_requests_waiting") < 1:
        await asyncio.sleep(0.02)


async def test_a_tokenizer_file_is_used_and_the_model_knows_its_ids(tmp_path: Path) -> None:
    """With its chat template."""
    write_tokenizer(tmp_path)
    async with engine_processes(1, *simulated("full", tokenizer=str(tmp_path))) as (engine,):
        chat = (
            await engine.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]})
        ).json["tokens"]
        assert (await engine.post("/detokenize", {"tokens": chat})).json == {
            "prompt": "<|user|>a</s><|assistant|>"
        }
        assert (
            await engine.post("/v1/completions", {"prompt": "héllo", "max_tokens": 2})
        ).status == 200


async def test_an_endless_head_is_cut() -> None:
    """uvicorn by itself would keep all of it."""
    async with engine_processes(1, *simulated()) as (engine,), connect(engine.port) as client:
        client.writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        with pytest.raises(ConnectionError):
            await send_headers(client, 1000)
        assert (await engine.get("/health")).status == 200


async def send_headers(client: HttpClient, count: int) -> None:
    for _ in range(count):
        client.writer.write(b"x: " + b"y" * 10_000 + b"\r\n")
        await client.writer.drain()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--preset", "nonsense"), "nonsense"),
        (("--num-blocks", "2", "--max-model-len", "0"), "--max-model-len"),
        (("--max-num-seqs", "0"), "--max-num-seqs"),
        (("--data-parallel-rank", "-1"), "--data-parallel-rank"),
        (("--grace-s", "nan"), "--grace-s"),
        (("--disk-directory", "/nowhere", "--disk-bytes", "9"), "disk"),
        (("--cpu-blocks", "9", "--cpu-cache-policy", "nonsense"), "nonsense"),
        (("--tier", "cqu", "num_blocks=4"), "did you mean cpu?"),
        (("--tier", "cpu", "num_block=4"), "did you mean num_blocks?"),
        (("--tier", "cpu", "num_blocks"), "must be OPTION=VALUE"),
        (("--tokenizer", "/nowhere"), "/nowhere"),
        (("--kv-events-endpoint", "nonsense"), "endpoint"),
        (("--slowdown", "0"), "--slowdown"),
        (("--step-overhead-s", "soon"), "--step-overhead-s"),
        (("--host", "203.0.113.1"), "203.0.113.1"),
        (("--port", "99999"), "99999"),
    ],
)
def test_invalid_options_are_refused_in_one_line(arguments: tuple[str, ...], word: str) -> None:
    """Option, value and rule; no traceback."""
    done = kvroute("engine", "--simulate", *arguments)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvroute engine: ")
    assert len(last) < 1000
    assert word in last
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_reported() -> None:
    """And the engine is closed again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = kvroute("engine", "--simulate", "--port", str(taken.getsockname()[1]))
    assert (done.returncode, "cannot be listened on" in done.stderr) == (2, True)


async def test_a_tier_of_another_package_is_named_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its options; and what a client's request says to the tiers reaches it."""
    tier_plug_in.install(tmp_path)
    heard = tmp_path / "heard"
    monkeypatch.setenv("PEER_LOG", str(heard))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    options = ("--tier", "peer", "num_blocks=100", "peer=10.0.0.7", "--no-promote")
    async with engine_processes(1, *simulated(), *options) as (engine,):
        params = {"share": True, "nested": {"from": ["a", 1]}}
        asked = {"max_tokens": 1, "kv_transfer_params": params}
        await engine.post("/v1/completions", {"prompt": list(range(100)), **asked})
        chat = {"messages": [{"role": "user", "content": "hello"}], **asked}
        assert (await engine.post("/v1/chat/completions", chat)).status == 200
        refused = await engine.post("/v1/completions", {"prompt": "x", "kv_transfer_params": "no"})
        assert (refused.status, refused.json["error"]["param"]) == (400, "kv_transfer_params")
    assert [json.loads(line) for line in heard.read_text().splitlines()] == [params, params]


# --- commands of other packages -------------------------------------------------------------------


def plug_in(directory: Path, name: str, source: str | None) -> Path:
    """A package that is installed next to ours and brings a command."""
    information = directory / f"plugged_{name}-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: plugged-{name}\nVersion: 1\n"
    )
    (information / "entry_points.txt").write_text(f"[kvroute.commands]\n{name} = plugged_{name}\n")
    if source is not None:
        (directory / f"plugged_{name}.py").write_text(source)
    return directory


PLUGGED = """\
print("imported")
def add_to(commands):
    parser = commands.add_parser("greet", help="says hello")
    parser.add_argument("--name", default="you")
    parser.set_defaults(run=lambda arguments: print(f"hello {arguments.name}") or 0)
"""


def test_a_command_of_another_package_runs_like_one_of_ours(tmp_path: Path) -> None:
    """It is listed without being imported, so no other command waits for it."""
    plug_in(tmp_path, "greet", PLUGGED)
    assert kvroute("greet", "--name", "me", path=tmp_path).stdout == "imported\nhello me\n"
    listed = kvroute("--help", path=tmp_path).stdout
    assert "greet" in listed
    assert "imported" not in listed


@pytest.mark.parametrize("source", [None, "import a_module_that_is_not_installed"])
def test_a_command_that_cannot_be_imported_breaks_only_itself(
    tmp_path: Path, source: str | None
) -> None:
    """And the error says what is missing."""
    plug_in(tmp_path, "broken", source)
    done = kvroute("broken", "--flag", path=tmp_path)
    missing = "a_module_that_is_not_installed" if source else "plugged_broken"
    assert (done.returncode, missing in done.stderr, "Traceback" in done.stderr) == (2, True, False)
    assert kvroute("serve", "--check", path=tmp_path).returncode == 0


def test_a_built_in_command_has_precedence_over_another_s(tmp_path: Path) -> None:
    """An installed package must not replace `serve`."""
    plug_in(tmp_path, "serve", PLUGGED)
    done = kvroute("serve", "--check", path=tmp_path)
    assert (done.returncode, "imported" in done.stdout) == (0, False)


def test_without_tensors_no_torch_is_imported() -> None:
    """It takes seconds and hundreds of MB, times the number of simulated replicas."""
    code = "import sys, kvroute_engine.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_an_engine_that_cannot_report_its_address_ends() -> None:
    """The process that started it has died; it must not stay behind, deaf to signals."""
    reading, writing = os.pipe()
    os.close(reading)
    engine = subprocess.Popen(
        [*COMMAND, "engine", "--port", "0", "--simulate"], cwd=ROOT, stderr=writing
    )
    os.close(writing)
    try:
        assert engine.wait(DEADLINE_S) != 0
    finally:
        engine.kill()
        engine.wait()


def test_sigint_ends_it_as_sigterm_does() -> None:
    """Ctrl-C in a terminal."""
    engine = EngineProcess(*simulated())
    try:
        engine.process.send_signal(signal.SIGINT)
        assert engine.process.wait(DEADLINE_S) == 0
        assert "Traceback" not in engine.log()
    finally:
        engine.forget()
