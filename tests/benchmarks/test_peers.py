"""The comparison with other routers runs without them, and its parts measure what they say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.peers.contestants import program
from benchmarks.peers.programs import Missing, Prompts, Replicas, build, load
from benchmarks.peers.run import print_table

without_compiler = pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler: no peer benchmarks"
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("programs")
    build(directory)
    return directory


@pytest.fixture
def replicas(programs: Path) -> Iterator[Replicas]:
    with Replicas(programs, 2, tokens=5, interval_ms=1) as started:
        yield started


@without_compiler
@pytest.mark.parametrize("stream", [False, True])
def test_load_counts_what_the_replica_answers(
    stream: bool, programs: Path, replicas: Replicas
) -> None:
    """A generator that counts wrongly makes every ratio wrong."""
    tail = '2],"stream":true}' if stream else "2]}"
    prompts = Prompts("/v1/completions", ['{"prompt":[1,', '{"prompt":[3,'], tail, ",")
    found = load(programs, replicas.ports[0], prompts, connections=4, seconds=0.3)
    assert (found["errors"], found["tokens"]) == (0, 5 * found["requests"] if stream else 0)
    assert found["requests"] >= 4


@without_compiler
def test_load_counts_what_fails(programs: Path) -> None:
    """A router that refuses everything would be the fastest of all."""

    class Refusing(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(503)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    prompts = Prompts("/v1/completions", ['{"prompt":[1,'], "2]}", ",")
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever).start()
        found = load(programs, server.server_port, prompts, connections=1, seconds=0.2)
        server.shutdown()
    assert found["requests"] == 0
    assert found["errors"] >= 1


@without_compiler
def test_each_row_runs_without_peers() -> None:
    """Minutes of measuring must not end in a mistake of the script."""
    sizes = "--rounds 1 --seconds 0.2 --blocks 512 --blocks-per-event 8 --tokens 1024 --sources 2"
    more = "--match-replicas 2 --memory-blocks 2048 --kilobytes 1 --streams 2"
    rows = "--rows apply match events_to_index reserve ids_and_events streams"
    command = [sys.executable, "-m", "benchmarks.peers.run", "--alone"]
    done = subprocess.run(
        [*command, *rows.split(), *sizes.split(), *more.split()],
        check=True,
        capture_output=True,
        text=True,
    )
    figures = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert list(dict.fromkeys(figure["benchmark"] for figure in figures)) == rows.split()[1:]
    assert all(figure["of"].startswith("kvroute") for figure in figures)
    assert all(figure.get("errors", 0) == 0 for figure in figures)


@without_compiler
def test_requests_and_streams_are_measured_with_and_without_events() -> None:
    """It must publish what it was asked to, or it shows nothing."""
    sizes = "--sources 2 --blocks-per-second 3000 --blocks-per-event 8 --streams 2"
    command = [sys.executable, "-m", "benchmarks.under_events", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--seconds", "0.3", *sizes.split()], check=True, capture_output=True
    )
    requests, streams = map(json.loads, done.stdout.splitlines())
    assert (requests["of"], streams["of"]) == ("requests", "streams")
    assert requests["errors"] == streams["errors"] == 0
    assert requests["blocks_per_second"] > 0
    assert streams["longest_ms"] > 0


def test_the_table_has_medians_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    """Ours by theirs, of the middle round."""
    figures = [
        {"benchmark": "apply", "of": of, "blocks_per_event": 8, "cpu_us": value}
        for of, values in (("kvroute", (4.0, 2.0, 3.0)), ("other", (6.0, 100.0, 1.0)))
        for value in values
    ]
    print_table([*figures, {"benchmark": "apply", "of": "third", "skipped": "the package third"}])
    rows = capsys.readouterr().out.splitlines()
    assert rows[-1] == "| apply | 8 blocks_per_event | cpu_us | 3 | other | 6 | 0.50 |"


def test_what_is_not_installed_is_named() -> None:
    """It is skipped with these words."""
    with pytest.raises(Missing, match="the program no-such-router"):
        program("no-such-router")
