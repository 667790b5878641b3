"""Encrypted event streams between real processes: `kvroute keys`, `kvroute engine`, the router."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine_process import EngineProcess, engine_processes, simulated
from tests.support.router_process import QUICK_HEALTH, router_process
from tests.support.warm_start import ROOT


def make_keys(directory: Path, *names: str) -> dict[str, str]:
    """By the command; return the public keys by name, as it prints them."""
    printed = {}
    for name in names:
        done = subprocess.run(
            [sys.executable, "-m", "router.cli.main", "keys", name, "--directory", str(directory)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        public, secret = done.stdout.splitlines()
        assert str(directory / f"{name}.key_secret") in secret
        printed[name] = public.split()[-1]
        assert stat.S_IMODE((directory / f"{name}.key_secret").stat().st_mode) == 0o600
    return printed


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    made = make_keys(tmp_path, "engine", "router", "stranger")
    clients = tmp_path / "clients"
    clients.mkdir()
    (tmp_path / "router.key").rename(clients / "router.key")
    return made


async def test_a_router_with_keys_follows_and_predicts(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    """The whole way: events and replays are encrypted, and the second of two equal prompts is
    predicted to the token."""
    async with engine_processes(1, *simulated("gptoss"), *options(tmp_path)) as (engine,):
        config = configured(engine, str(tmp_path / "router.key_secret"), keys["engine"])
        with router_process(config) as router:
            await router.until_in_rotation(engine)  # type: ignore[arg-type]
            model = (await router.get("/v1/models")).json["data"][0]["id"]
            body = {"model": model, "prompt": list(range(5, 105)), "max_tokens": 2}
            assert (await router.post("/v1/completions", body)).status == 200
            await router.until(lambda now: now.sum("kvroute_blocks_stored_total") > 0, "events")
            answer = await router.post("/v1/completions", body)
            cached = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > 0
            assert int(answer.headers["x-kv-hit-tokens"]) == cached


@pytest.mark.parametrize(
    ("own", "why"),
    [(None, "wants CURVE keys"), ("stranger", "does not know our public key")],
)
async def test_a_router_without_the_right_keys_gets_nothing_and_says_why(
    tmp_path: Path, keys: dict[str, str], own: str | None, why: str
) -> None:
    """Requests are still served, by load."""
    async with engine_processes(1, *simulated("gptoss"), *options(tmp_path)) as (engine,):
        secret = None if own is None else str(tmp_path / f"{own}.key_secret")
        config = configured(engine, secret, None if own is None else keys["engine"])
        with router_process(config) as router:
            await router.until(
                lambda now: now.sum("kvroute_replica_healthy", replica=engine.name) == 1, "healthy"
            )
            await router.until(lambda _now: why in router.log(), f"the log says: {why}")
            assert (await router.metrics()).sum("kvroute_source_state", state="live") == 0


def options(directory: Path) -> list[str]:
    secret, clients = directory / "engine.key_secret", directory / "clients"
    return ["--kv-events-keys", str(secret), "--kv-events-clients", str(clients)]


def configured(
    engine: EngineProcess, secret: str | None, server_key: str | None
) -> dict[str, object]:
    return {
        "health": QUICK_HEALTH,
        "replicas": [{"url": engine.url, "id": engine.name}],
        "events": {"curve_keys": secret, "curve_server_key": server_key},
    }
