"""Starts each router, asks it, and reads its answer."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.programs import Missing, Process, request, wait_until
from benchmarks.peers.publishing import BLOCK_SIZE

MODEL = "bench"
_BIN = Path(sys.executable).parent


def free_port() -> int:
    """Return a port that no process listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def module(name: str) -> None:
    """Make sure that a Python package is installed.

    Raises:
        Missing: It is not.
    """
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise Missing(f"the package {name}")


def program(name: str) -> str:
    """Return the path of a program beside this Python, or of the system.

    Raises:
        Missing: There is none.
    """
    beside = _BIN / name
    found = str(beside) if beside.is_file() else shutil.which(name, path="/usr/sbin:/usr/bin:/bin")
    if found is None:
        raise Missing(f"the program {name}")
    return found


# --- indexes that follow event streams ------------------------------------------------------------


class IndexServer(Protocol):
    """A process that follows event streams and is asked over HTTP what they hold."""

    name: str
    process: Process
    port: int
    ask_path: str

    def follow(self, endpoints: Sequence[str]) -> None:
        """Start to follow one source for each endpoint."""

    def body(self, tokens: Sequence[int]) -> Any:
        """Return the question how much of a prompt is cached."""

    def hit(self, answer: Any) -> int:
        """Return the blocks that the best source holds, by its answer."""

    def close(self) -> None:
        """End it."""


def cached_blocks(server: IndexServer, tokens: Sequence[int]) -> int:
    """Ask a server.

    Args:
        server: Whom.
        tokens: The prompt.
    """
    answer = request(server.port, server.ask_path, server.body(tokens))
    return server.hit(answer.json()) if answer.status == 200 else 0


class Kvroute:
    """Ours: `kvroute serve`, asked with `/route`, which also ranks.

    Args:
        replica_urls: One for each source.
        core: The CPU; None: any.
        tokenizer: Of the model; None: prompts are token ids.
        threads: Of its data plane.
    """

    name = "kvroute"
    ask_path = "/route"

    def __init__(
        self,
        replica_urls: Sequence[str],
        core: int | None = None,
        tokenizer: Path | None = None,
        threads: int = 1,
    ) -> None:
        self._threads = threads
        self._urls = replica_urls
        self._core = core
        self._tokenizer = tokenizer
        self._directory = tempfile.TemporaryDirectory(prefix="kvroute-bench-")

    def follow(self, endpoints: Sequence[str]) -> None:
        events: list[list[dict[str, str]]] = [
            [{"endpoint": endpoint, "topic": ""}] for endpoint in endpoints
        ] or [[] for _ in self._urls]
        model = {"tokenizer": str(self._tokenizer)} if self._tokenizer else {}
        config = {
            "server": {"port": 0, "threads": self._threads},
            "observability": {"log_level": "warning"},
            "models": [{"name": MODEL, **model}],
            "replicas": [
                {"id": f"r{number}", "url": url, "models": [MODEL], "kv_events": each}
                for number, (url, each) in enumerate(zip(self._urls, events, strict=True))
            ],
        }
        path = Path(self._directory.name) / "kvroute.yaml"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "router.cli.main", "serve", "--config", str(path)]
        self.process = Process(command, self._core)
        wait_until(lambda: "://" in self._log(), "kvroute's address")
        first = self.process.log().splitlines()[0]
        self.port = int(first.rsplit(":", 1)[1].split()[0].strip("/"))
        wait_until(lambda: request(self.port, "/readyz").status == 200, "kvroute")

    def _log(self) -> str:
        if self.process.has_ended:
            raise Missing(f"kvroute: it ended at once: {self.process.log()[-300:]}")
        return self.process.log()

    def body(self, tokens: Sequence[int]) -> Any:
        # The last token is always computed, so a prompt of whole blocks asks for one more.
        return {"model": MODEL, "prompt": [*tokens, 1], "max_tokens": 1}

    def hit(self, answer: Any) -> int:
        return _largest(answer, "cached_tokens") // BLOCK_SIZE

    def close(self) -> None:
        self.process.end()
        self._directory.cleanup()


def _largest(value: Any, name: str) -> int:
    if isinstance(value, dict):
        own = value.get(name)
        inner = [_largest(each, name) for each in value.values()]
        return max([own if isinstance(own, int) else 0, *inner])
    if isinstance(value, list):
        return max([0, *(_largest(each, name) for each in value)])
    return 0


class DynamoIndexer:
    """Dynamo's standalone indexer, asked with `/query`, which matches and does not rank.

    Args:
        core: The CPU; None: any.
    """

    name = "Dynamo's indexer"
    ask_path = "/query"

    def __init__(self, core: int | None = None) -> None:
        module("dynamo.indexer")
        self.port = free_port()
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self.port)]
        self.process = Process(command, core, {"DYN_LOG": "error"})
        wait_until(lambda: request(self.port, "/health").status == 200, self.name)

    def follow(self, endpoints: Sequence[str]) -> None:
        for number, endpoint in enumerate(endpoints):
            body = {
                "instance_id": number,
                "endpoint": endpoint,
                "model_name": MODEL,
                "block_size": BLOCK_SIZE,
            }
            answer = request(self.port, "/register", body)
            assert answer.status in (200, 201), answer

    def body(self, tokens: Sequence[int]) -> Any:
        return {"model_name": MODEL, "token_ids": list(tokens)}

    def hit(self, answer: Any) -> int:
        ranks = answer["scores"].values()
        return max([0, *(tokens for rank in ranks for tokens in rank.values())]) // BLOCK_SIZE

    def close(self) -> None:
        self.process.end()


class DynamoSelector:
    """Dynamo's selection service, asked with `/select`, which ranks.

    Args:
        core: The CPU; None: any.
    """

    name = "Dynamo's selection service"
    ask_path = "/select"

    def __init__(self, core: int | None = None) -> None:
        module("dynamo.select_service")
        self.port = free_port()
        command = [sys.executable, "-m", "dynamo.select_service", "--port", str(self.port)]
        self.process = Process(command, core, {"DYN_LOG": "error"})
        wait_until(lambda: request(self.port, "/health").status == 200, self.name)

    def follow(self, endpoints: Sequence[str]) -> None:
        for number, endpoint in enumerate(endpoints):
            body = {
                "worker_id": number,
                "model_name": MODEL,
                "endpoint": f"http://127.0.0.1:{number + 1}",
                "block_size": BLOCK_SIZE,
                "kv_events_endpoints": {"0": endpoint},
                "max_num_batched_tokens": 8192,
                "total_kv_blocks": 1_000_000,
            }
            answer = request(self.port, "/workers", body)
            assert answer.status == 201, answer
        wait_until(
            lambda: request(self.port, "/ready").json()["schedulable_workers"] == len(endpoints),
            self.name,
        )

    def body(self, tokens: Sequence[int]) -> Any:
        return {"model_name": MODEL, "token_ids": list(tokens)}

    def hit(self, answer: Any) -> int:
        tokens: int = answer["overlap"]["longest_matched"]
        return tokens // BLOCK_SIZE

    def close(self) -> None:
        self.process.end()


# --- proxies --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proxy:
    """A running proxy."""

    name: str
    port: int
    process: Process
    close: Callable[[], None]


def kvroute_proxy(
    replica_urls: Sequence[str],
    endpoints: Sequence[str],
    core: int | None,
    tokenizer: Path | None = None,
) -> Proxy:
    """Start our own router.

    Args:
        replica_urls: Where requests go.
        endpoints: Of the replicas' events; none: they publish none.
        core: The CPU; None: any.
        tokenizer: See `Kvroute`.
    """
    server = Kvroute(replica_urls, core, tokenizer)
    server.follow(endpoints)
    return Proxy("kvroute", server.port, server.process, server.close)


def vllm_router(
    replica_urls: Sequence[str], endpoints: Sequence[str], core: int | None, policy: str
) -> Proxy:
    """vLLM's router.

    Args:
        replica_urls: Where requests go.
        endpoints: Of the replicas' events, for the policy `kv_aware`.
        core: The CPU; None: any.
        policy: `kv_aware`, `cache_aware` or `round_robin`.
    """
    options = ["--policy", policy]
    if policy == "kv_aware":
        for url, endpoint in zip(replica_urls, endpoints, strict=True):
            options += ["--kv-event-source", f"{url}={endpoint}"]
        options += ["--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", MODEL]
    command = [program("vllm-router"), "--log-level", "error", *options]
    return _rust_router(f"vllm-router {policy}", command, replica_urls, core)


def smg(replica_urls: Sequence[str], core: int | None) -> Proxy:
    """Start the Shepherd Model Gateway, with its policy for caches.

    Args:
        replica_urls: Where requests go.
        core: The CPU; None: any.
    """
    command = [program("smg"), "launch", "--log-level", "error", "--policy", "cache_aware"]
    return _rust_router("smg cache_aware", command, replica_urls, core)


def sglang_router(replica_urls: Sequence[str], core: int | None) -> Proxy:
    """Start SGLang's router, with its policy for caches.

    Args:
        replica_urls: Where requests go.
        core: The CPU; None: any.
    """
    command = [program("sglang-router"), "launch", "--log-level", "error"]
    command += ["--policy", "cache_aware"]
    return _rust_router("sglang-router cache_aware", command, replica_urls, core)


def _rust_router(
    name: str, command: Sequence[str], replica_urls: Sequence[str], core: int | None
) -> Proxy:
    port = free_port()
    more = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    limits = ["--max-concurrent-requests", "8192"]
    process = Process([*command, "--worker-urls", *replica_urls, *more, *limits], core)
    # A chat is what all of them take, and is answered only once a replica is known to be healthy.
    body = {"model": MODEL, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}

    def is_ready() -> bool:
        if process.has_ended:
            raise Missing(f"{name}: it ended at once: {process.log()[-300:]}")
        return request(port, "/v1/chat/completions", body).status == 200

    try:
        wait_until(is_ready, name)
    except BaseException:
        process.end()
        raise
    return Proxy(name, port, process, process.end)


def nginx(replica_urls: Sequence[str], core: int | None) -> Proxy:
    """nginx in turn, which knows nothing of prompts: what passing bytes on costs.

    Args:
        replica_urls: Where requests go.
        core: The CPU; None: any.
    """
    binary, port = program("nginx"), free_port()
    directory = tempfile.TemporaryDirectory(prefix="kvroute-bench-")
    servers = "".join(f"server {url.removeprefix('http://')};" for url in replica_urls)
    temporary = "".join(
        f"{kind}_temp_path {directory.name};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = (
        f"daemon off;worker_processes 1;pid {directory.name}/pid;error_log stderr error;"
        "events{worker_connections 8192;}http{access_log off;"
        f"{temporary}keepalive_requests 100000000;client_max_body_size 64m;"
        "client_body_buffer_size 1m;"
        f"upstream replicas{{{servers}keepalive 2048;keepalive_requests 100000000;}}"
        f"server{{listen 127.0.0.1:{port};location /{{proxy_pass http://replicas;"
        'proxy_http_version 1.1;proxy_set_header Connection "";proxy_buffering off;}}}'
    )
    path = Path(directory.name) / "nginx.conf"
    path.write_text(config)
    process = Process([binary, "-p", directory.name, "-c", str(path)], core)

    def close() -> None:
        process.end()
        directory.cleanup()

    wait_until(lambda: request(port, "/health").status == 200, "nginx")
    return Proxy("nginx", port, process, close)
