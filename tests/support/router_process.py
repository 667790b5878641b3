"""The router as operators run it: a process, configured by a YAML file, watched over HTTP, stopped
by SIGTERM."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engine_stub import EngineStub
from tests.support.http_client import Answer, ask
from tests.support.waiting import DEADLINE_S, START_S, eventually
from tests.support.warm_start import start

_ANNOUNCEMENT = re.compile(rb'listens on (https?://\S+?:(\d+))["\n]')

QUICK_HEALTH = {
    "interval_s": 0.25,
    "timeout_s": 5.0,
    "discovery_interval_s": 1.0,
    "unhealthy_after": 2,
}


class Metrics:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def sum(self, name: str, **labels: str) -> float:
        """Sum over all samples of that name that have these labels; 0 if there is none."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name
            and all(sample.labels.get(key) == value for key, value in labels.items())
        )

    def names(self) -> set[str]:
        return {sample.name for sample in self._samples}

    def by(self, label: str, name: str) -> dict[str, float]:
        """Sums by one label."""
        return {
            value: self.sum(name, **{label: value})
            for value in {s.labels.get(label, "") for s in self._samples}
        }


class RouterProcess:
    """`kvroute serve` on a port chosen by the system.

    Args:
        config: The configuration as plain data; without a port, the system chooses one.
        environ: Added to the environment.
        limit: Called in the new process before it becomes the router.
        options: Further ones of the command line.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        limit: Callable[[], None] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvroute-test-")
        directory = Path(self._directory.name)
        self.config_path = path = directory / "kvroute.yaml"
        self.configure(config or {})
        self._log = directory / "stderr.log"
        arguments = ("serve", "--config", str(path), *options)
        with self._log.open("wb") as stderr:
            self.process = start(arguments, stderr, environ, limit)
        try:
            self.url, self.port = self._announced()
        except BaseException:
            self.kill()
            raise

    def configure(self, config: Mapping[str, Any]) -> None:
        """Write its configuration, by renaming as careful programs do."""
        server = {"port": 0, "host_names": ["router", "x"], **config.get("server", {})}
        written = self.config_path.with_suffix(".new")
        written.write_text(yaml.safe_dump({**config, "server": server}))
        written.replace(self.config_path)

    def log(self) -> str:
        """Everything it has logged."""
        return self._log.read_text(errors="replace")

    def check_log(self, since: int = 0) -> int:
        """Check that it has logged no error of its own from position *since* on; return the current
        position."""
        said = self.log()
        found = max(said.find("Traceback", since), said.find("CRITICAL", since))
        assert found < 0, said[max(since, found - 500) : found + 6000]
        return len(said)

    @property
    def rss_bytes(self) -> int:
        """Memory in use, as the kernel counts it."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu_s(self) -> float:
        """Seconds for which its first process has computed; on a busy machine others pass too."""
        return time.clock_gettime(~self.process.pid << 3 | 2)  # Linux: CPUCLOCK_SCHED of a process

    @property
    def sockets(self) -> int:
        """How many sockets it has open."""
        held = 0
        for path in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                held += os.readlink(path).startswith("socket:")
        return held

    @property
    def clients(self) -> int:
        """How many connections of clients it has open."""
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        at_port = f":{self.port:04X}"
        open_states = ("01", "08")  # established, and closed by the client
        return sum(
            local.endswith(at_port) and state in open_states
            for _, local, _, state, *_ in map(str.split, lines)
        )

    # --- asking -----------------------------------------------------------------------------------

    async def get(self, target: str, headers: Mapping[str, str] | None = None) -> Answer:
        return await ask(self.port, "GET", target, b"", headers)

    async def post(
        self, target: str, body: object = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        headers = {"content-type": "application/json", **(headers or {})}
        return await ask(self.port, "POST", target, body, headers)

    async def delete(self, target: str, headers: Mapping[str, str] | None = None) -> Answer:
        return await ask(self.port, "DELETE", target, b"", headers)

    async def until_core_decides(self, body: Mapping[str, Any]) -> None:
        """Send *body*, whose prompt is token ids, until no Python is needed for it."""
        while True:
            assert (await self.post("/v1/completions", body)).status == 200
            (last,) = (await self.get("/requests?limit=1")).json["requests"]
            if last["end"] and last["reason"].endswith("; decided by the data plane"):
                return

    async def metrics(self, headers: Mapping[str, str] | None = None) -> Metrics:
        answer = await self.get("/metrics", headers)
        assert answer.status == 200, answer
        return Metrics(answer.body.decode())

    async def replica(self, replica_id: str) -> dict[str, Any]:
        answer = await self.get(f"/replicas/{replica_id}")
        assert answer.status == 200, answer
        found: dict[str, Any] = answer.json
        return found

    async def until(
        self, condition: Callable[[Metrics], object], what: str, within_s: float = DEADLINE_S
    ) -> None:
        """Scrape until *condition* holds."""
        deadline = time.monotonic() + within_s
        while not condition(await self.metrics()):
            assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"

    async def until_idle(self, within_s: float = DEADLINE_S) -> None:
        """Wait until every count of what is in flight is zero again."""
        names = (
            "kvroute_in_flight_requests",
            "kvroute_in_flight_prefill_tokens",
            "kvroute_in_flight_decodes",
        )
        names += ("kvroute_requests_under_way",)
        await self.until(
            lambda now: not any(now.sum(name) for name in names), "nothing is in flight", within_s
        )

    # --- replicas ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def serving(self, *stubs: EngineStub, **settings: Any) -> AsyncIterator[None]:
        """Add replicas at run time by their URLs only, wait until they are in rotation, and remove
        them at the end."""
        for stub in stubs:
            answer = await self.post("/replicas", {"url": stub.url, "id": stub.name, **settings})
            assert answer.status == 201, answer
        try:
            for stub in stubs:
                await self.until_in_rotation(stub)
            yield
        finally:
            for stub in stubs if self.process.poll() is None else ():
                with contextlib.suppress(ConnectionError):
                    await self.delete(f"/replicas/{stub.name}")

    async def until_in_rotation(self, stub: EngineStub, within_s: float = DEADLINE_S) -> None:
        """Wait until it is healthy, its models are known, and its event streams are live."""
        deadline = time.monotonic() + within_s
        while True:
            found = await self.replica(stub.name)
            feeds = [source["feed"] for source in found["sources"]]
            is_live = len(feeds) == stub.sources and all(
                feed and feed["state"] == "live" for feed in feeds
            )
            if found["state"] == "healthy" and found["models"] and is_live:
                return
            assert time.monotonic() < deadline, (
                f"{stub.name} is not in rotation within {within_s:g} s: {found}"
            )

    async def until_applied(self, stub: EngineStub, within_s: float = DEADLINE_S) -> None:
        """Wait until the index holds all blocks that *stub* has published."""
        deadline = time.monotonic() + within_s
        while True:
            (source,) = (await self.replica(stub.name))["sources"]
            blocks = (
                sum(held["blocks"] for held in source["cache"]["blocks"]) if source["cache"] else 0
            )
            if source["feed"]["state"] == "live" and blocks == stub.stored_blocks:
                return
            assert time.monotonic() < deadline, (
                f"{stub.name}: not applied within {within_s:g} s: {source}"
            )

    # --- the end ----------------------------------------------------------------------------------

    def tell_to_stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def ended(self, within_s: float = DEADLINE_S) -> int:
        """Wait for the exit code."""
        await eventually(lambda: self.process.poll() is not None, "the router has ended", within_s)
        return int(self.process.returncode)

    def stop(self, within_s: float = DEADLINE_S) -> None:
        """Send SIGTERM; it must exit with 0 and without an error of its own."""
        self.tell_to_stop()
        try:
            code = self.process.wait(within_s)
            assert code == 0, f"exit code {code}\n{self.log()[-4000:]}"
            self.check_log()
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._directory.cleanup()

    def _announced(self) -> tuple[str, int]:
        deadline = time.monotonic() + START_S
        while True:
            said = self._log.read_bytes()
            found = _ANNOUNCEMENT.search(said)
            if found:
                return found[1].decode(), int(found[2])
            assert self.process.poll() is None, f"the router ended: {said.decode(errors='replace')}"
            assert time.monotonic() < deadline, (
                f"the router does not listen: {said.decode(errors='replace')}"
            )
            time.sleep(0.01)


@contextlib.contextmanager
def router_process(
    config: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    limit: Callable[[], None] | None = None,
    options: Sequence[str] = (),
) -> Iterator[RouterProcess]:
    """Run a router until the block ends; then it must stop cleanly, unless it was stopped
    already."""
    router = RouterProcess(config, environ, limit, options)
    try:
        yield router
        if router.process.poll() is None:
            router.stop()
    finally:
        router.kill()
