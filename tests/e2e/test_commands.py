"""The commands that connect to running engines and routers."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvevents.publisher_config import PublisherConfig
from router.cli.main import main
from router.cli.recordings import Query, RecordingReader
from tests.support.engine_stub import engines, unique
from tests.support.hybrid_stub import HybridStub
from tests.support.recorded_publisher import RecordedStreamPublisher
from tests.support.router_process import RouterProcess, router_process
from tests.support.signals import reset_signal_handlers
from tests.support.vllm_publisher import free_port
from tests.support.waiting import DEADLINE_S, eventually

COMMAND = [sys.executable, "-m", "router.cli.main"]
STREAM = Path(__file__).parents[1] / "conformance" / "streams" / "real_full.jsonl.gz"


def kvroute(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments]
    inherited = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**inherited, **environ},
    )


def refused(*arguments: str) -> tuple[int, str]:
    """Code and message of a command that fails before it connects to anything: it needs no process
    of its own."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = main(arguments)
        except SystemExit as exit:  # of argparse
            code = int(exit.code or 0)
    return code, said.getvalue()


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    """One without replicas: a test removes its own."""
    with router_process({}) as process:
        yield process


@pytest.fixture(scope="module")
def guarded() -> Iterator[RouterProcess]:
    """One whose operators have a key."""
    with router_process({"server": {"operator_api_key": "operator-key"}}) as process:
        yield process


def frames(path: Path) -> list[bytes]:
    with RecordingReader(path) as reader:
        return [record for record in reader if not isinstance(record, Query)]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--port", "99999"], "server.port: 99999"),
        (["--port", "-1"], "server.port: -1"),
        (["--replica", "http://a:1", "--replica", "http://a:1"], "replicas[1].url"),
        (["--replica", "foo"], "replicas[0].url"),
    ],
)
@pytest.mark.parametrize("check", [[], ["--check"]])
def test_options_are_checked_together_with_the_file(
    arguments: list[str], problem: str, check: list[str]
) -> None:
    """A typo on the command line is an error with its place, not a traceback."""
    code, message = refused("serve", *arguments, *check)
    assert code == 2
    assert problem in message
    assert "Traceback" not in message


def test_check_loads_tokenizers(tmp_path: Path) -> None:
    """What `--check` lets pass must start; a deployment relies on it."""
    path = tmp_path / "kvroute.yaml"
    path.write_text("models: [{name: m, tokenizer: missing}]\n")
    (tmp_path / "missing").mkdir()
    done = kvroute("serve", "--config", str(path), "--check")
    assert done.returncode == 2
    assert f"{tmp_path}/missing/tokenizer.json" in done.stderr


def test_check_names_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """A model's name on a hub is the likeliest thing to stand there."""
    path = tmp_path / "kvroute.yaml"
    path.write_text("models: [{name: m, tokenizer: google/gemma-3-12b-it}]\n")
    done = kvroute("serve", "--config", str(path), "--check")
    assert done.returncode == 2
    assert f"models[0]: {tmp_path}/google/gemma-3-12b-it: no such directory; must be" in done.stderr


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ("events: {curve_keys: missing}", "events.curve_keys"),
        ("events: {hash_key: missing}", "events.hash_key"),
        ("state: {peer_tls: {ca: missing}}", "state.peer_tls.ca"),
        ("board: {url: 'rediss://a', secret: s, ca: missing}", "board.ca"),
        (
            "doors: {ext_proc: {listen: '127.0.0.1:0', tls: {certificate: missing, key: missing}}}",
            "doors.ext_proc.tls.certificate",
        ),
    ],
)
def test_check_reads_every_file_that_a_start_reads(
    tmp_path: Path, section: str, place: str
) -> None:
    """It looked at some, and a deployment that relied on it did not come up."""
    path = tmp_path / "kvroute.yaml"
    path.write_text(section)
    done = kvroute("serve", "--config", str(path), "--check")
    assert done.returncode == 2
    assert f"  {place}: " in done.stderr
    assert "missing" in done.stderr


@pytest.mark.parametrize("name", ["stream.jsonl", "stream.jsonl.gz"])
def test_a_captured_stream_is_what_was_published_and_can_be_replayed(
    tmp_path: Path, name: str
) -> None:
    """A user records an engine to check the index against it."""
    published = frames(STREAM)[:40]
    config = PublisherConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    with RecordedStreamPublisher(config) as publisher:
        for payload in published:
            publisher.publish_raw(payload)
        output = tmp_path / name
        addresses = [
            "--endpoint",
            publisher.endpoint,
            "--replay-endpoint",
            str(publisher.replay_endpoint),
        ]
        done = kvroute(
            "capture",
            *addresses,
            "--output",
            str(output),
            "--batches",
            "40",
            "--seconds",
            "30",
            "--json",
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["batches"] == 40
    assert frames(output) == published
    summary = json.loads(kvroute("replay", str(output)).stdout)
    assert (summary["frames"], summary["malformed"]) == (40, 0)


def test_a_recording_that_is_interrupted_keeps_and_counts_what_it_has(tmp_path: Path) -> None:
    """A recording usually ends with Ctrl-C."""
    published = frames(STREAM)[:5]
    output = tmp_path / "stream.jsonl"
    config = PublisherConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    with RecordedStreamPublisher(config) as publisher:
        for payload in published:
            publisher.publish_raw(payload)
        addresses = (
            "--endpoint",
            publisher.endpoint,
            "--replay-endpoint",
            publisher.replay_endpoint,
        )
        command = [*COMMAND, "capture", *map(str, addresses), "--output", str(output)]
        recording = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=reset_signal_handlers,
        )
        assert recording.stderr is not None
        while "live" not in recording.stderr.readline():
            assert recording.poll() is None
        recording.send_signal(signal.SIGINT)
        said, _ = recording.communicate()
    assert (recording.returncode, said) == (0, f"5 batches in {output}\n")
    assert frames(output) == published


def test_a_recording_for_which_there_is_no_room_ends_with_the_reason() -> None:
    """A disk is soon full of prompts; the command ended with a traceback of two errors."""
    config = PublisherConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    with RecordedStreamPublisher(config) as publisher:
        for payload in frames(STREAM)[:5]:
            publisher.publish_raw(payload)
        addresses = "--endpoint", publisher.endpoint, "--replay-endpoint", publisher.replay_endpoint
        done = kvroute("capture", *map(str, addresses), "--output", "/dev/full", "--seconds", "30")
    assert done.returncode == 2
    assert done.stderr.endswith("kvroute: /dev/full: No space left on device\n")
    assert "Traceback" not in done.stderr


def test_a_silent_engine_gives_an_empty_recording_and_a_failure(tmp_path: Path) -> None:
    """A script must notice that it recorded nothing."""
    with RecordedStreamPublisher(PublisherConfig(endpoint="tcp://127.0.0.1:0")) as publisher:
        done = kvroute(
            "capture",
            "--endpoint",
            publisher.endpoint,
            "--output",
            str(tmp_path / "s.jsonl"),
            "--seconds",
            "0.5",
        )
    assert done.returncode == 1
    assert "0 batches" in done.stdout


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "http://127.0.0.1:5557", "nonsense"])
def test_an_address_that_cannot_be_connected_to_is_refused_at_once(
    tmp_path: Path, endpoint: str
) -> None:
    """The message names the address and the rule."""
    code, message = refused(
        "capture", "--endpoint", endpoint, "--output", str(tmp_path / "s.jsonl"), "--seconds", "5"
    )
    assert code == 2
    assert message.splitlines()[-1].startswith("kvroute: ")
    assert "Traceback" not in message


async def test_the_route_command_shows_where_a_prompt_would_go_and_why(
    router: RouterProcess,
) -> None:
    """It is what an operator asks first."""
    async with engines(2, has_events=True) as stubs, router.serving(*stubs):
        ids = list(range(500, 580))
        stubs[1].store(ids)
        await router.until_applied(stubs[1])
        asked = [
            "route",
            "--url",
            router.url,
            "--model",
            stubs[1].model,
            "--token-ids",
            json.dumps([*ids, 7]),
        ]
        found = await asyncio.to_thread(kvroute, *asked, "--json")
        shown = await asyncio.to_thread(kvroute, *asked)
        wrong = await asyncio.to_thread(
            kvroute, "route", "--url", router.url, "--model", "nobody", "--token-ids", "1"
        )
    answer = json.loads(found.stdout)
    assert (answer["replica"], answer["ranking"][0]["hit"]["gpu_cached_tokens"]) == (
        stubs[1].name,
        80,
    )
    assert "80" in shown.stdout
    assert (wrong.returncode, "status 404" in wrong.stderr) == (2, True)


# --- top ------------------------------------------------------------------------------------------


async def test_top_shows_what_is_wrong_the_blocks_and_the_last_requests(
    router: RouterProcess,
) -> None:
    """For a machine with a terminal and no browser."""
    async with HybridStub(unique("model")) as stub, router.serving(stub):
        ids = list(range(500, 596))
        stub.store(ids)
        await router.until_applied(stub)
        await router.post("/v1/completions", {"model": stub.model, "prompt": [*ids, 7]})
        await router.post(f"/replicas/{stub.name}/drain")
        done = await asyncio.to_thread(kvroute, "top", "--url", router.url)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[:2] == ["1 replica has problems:", f"{stub.name} draining: gets no new requests"]
    assert any(
        line.startswith(f"{stub.name} draining 0 ") and line.endswith("live full 6")
        for line in lines
    )
    assert "window 64 6" in lines
    assert any(f"{stub.name} 96/97 exact" in line for line in lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_top_survives_a_restart_of_the_router_and_ends_on_a_signal(
    number: signal.Signals,
) -> None:
    """An operator watches a restart; afterwards the terminal is restored."""
    at_port = {"server": {"port": free_port()}}
    with router_process(at_port) as router:
        terminal = Terminal("top", "--url", router.url, "--interval", "0.1")
        try:
            await terminal.until("The router has no replicas.")
            router.process.kill()
            await terminal.until("no connection: ")
            with router_process(at_port) as again:
                async with HybridStub(unique("model")) as stub, again.serving(stub):
                    await terminal.until("All replicas are well.")
            terminal.process.send_signal(number)
            assert await asyncio.to_thread(terminal.process.wait, DEADLINE_S) == 0
            await terminal.until("\x1b[?1049l")
            assert "\x1b[?25h" in terminal.said
            assert "Traceback" not in terminal.said
        finally:
            terminal.close()


async def test_top_scrolls_filters_and_quits_by_keys() -> None:
    """A fleet is larger than a terminal."""
    with router_process({}) as router:
        for number in range(40):
            body = {"url": f"http://127.0.0.1:{1 + number}", "id": f"replica-{number:02}"}
            assert (await router.post("/replicas", body)).status == 201
        terminal = Terminal("top", "--url", router.url, "--interval", "600")
        try:
            await terminal.until("replica-00")
            assert "replica-39" not in terminal.said
            for _ in range(5):
                terminal.press("\x1b[6~")
            await terminal.until("replica-39")
            terminal.press("/cA-1")
            terminal.press("\x7f1")
            await terminal.until("/cA-1_")
            terminal.press("5")
            await terminal.until("/cA-15_")
            terminal.press("\n")
            await terminal.until("Esc: all")
            last = terminal.said.rpartition("/cA-15")[0].rpartition("\x1b[H")[2]
            assert "replica-15" in last
            assert "replica-16" not in last
            terminal.press("\x1b")
            await terminal.until("replica-00")
            terminal.press("q")
            assert await asyncio.to_thread(terminal.process.wait, DEADLINE_S) == 0
            await terminal.until("\x1b[?1049l")
        finally:
            terminal.close()


async def test_top_soon_reports_that_a_router_hangs() -> None:
    """A stale view that looks current would mislead."""
    with router_process({}) as router:
        terminal = Terminal("top", "--url", router.url, "--interval", "0.1")
        try:
            await terminal.until("The router has no replicas.")
            router.process.send_signal(signal.SIGSTOP)
            await terminal.until("showing the state of ")
        finally:
            router.process.send_signal(signal.SIGCONT)
            terminal.close()


def test_top_into_a_pipe_ends_also_where_colours_are_forced(router: RouterProcess) -> None:
    """As many a CI does, which does not turn a pipe into a terminal."""
    done = kvroute("top", "--url", router.url, FORCE_COLOR="1")
    assert done.returncode == 0
    assert "The router has no replicas." in done.stdout


@pytest.mark.parametrize(
    ("key", "code"), [("operator-key\n", 0), ("operator\nkey", 2), ("schlüssel", 2)]
)
def test_a_key_that_no_header_can_hold_is_refused(
    key: str, code: int, guarded: RouterProcess
) -> None:
    """Mounted secrets end in a newline; a traceback would show the key."""
    done = kvroute("top", "--url", guarded.url, KVROUTE_OPERATOR_API_KEY=key)
    assert (
        done.returncode,
        "KVROUTE_OPERATOR_API_KEY: holds what no header can" in done.stderr,
    ) == (code, code == 2)
    assert key.strip() not in done.stdout + done.stderr


@pytest.mark.parametrize(("key", "code"), [("operator-key", 0), ("another", 2), (None, 2)])
def test_top_needs_the_operator_key_where_there_is_one(
    key: str | None, code: int, guarded: RouterProcess
) -> None:
    """It is read from the environment: a command line is seen by everyone on the machine."""
    environ = {"KVROUTE_OPERATOR_API_KEY": key} if key else {}
    done = kvroute("top", "--url", guarded.url, **environ)
    assert done.returncode == code
    assert ("status 401" in done.stderr) is (code == 2)
    assert "operator-key" not in done.stdout + done.stderr


@pytest.mark.parametrize("body", [b"{}", b'{"now": "x"}', b"[1]", b"\xff", b""])
async def test_top_reports_a_response_that_is_not_a_routers(body: bytes) -> None:
    """Another version, or another server at that address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        done = await asyncio.to_thread(kvroute, "top", "--url", url)
    assert done.returncode == 2
    assert "not the response of a router of this version" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("interval", ["0", "-1", "x", "nan", "1e9"])
def test_an_invalid_interval_is_refused(interval: str) -> None:
    """The value and the rule."""
    code, message = refused("top", "--interval", interval)
    assert (code, "must be from 0.1 to 3600 seconds" in message) == (2, True)


class Terminal:
    """A command on a terminal of 100 columns and 30 lines."""

    def __init__(self, *arguments: str) -> None:
        self.said = ""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        os.set_blocking(self._ours, False)
        command = [*COMMAND, *arguments]
        environ = {**os.environ, "TERM": "xterm"}
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environ,
            preexec_fn=reset_signal_handlers,
        )
        os.close(theirs)

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    async def until(self, words: str) -> None:
        """Wait until it shows *words*, after everything that was waited for before."""
        seen = len(self.said)

        def is_said() -> bool:
            with contextlib.suppress(BlockingIOError, OSError):  # no new output; it has ended
                while more := os.read(self._ours, 65_536):
                    self.said += more.decode(errors="replace")
            return words in self.said[seen:]

        await eventually(is_said, f"the terminal shows {words!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
