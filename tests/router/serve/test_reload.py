"""Configurations that are read again."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from router.config.schema import RouterConfig
from router.serve.reload import REFUSED, TAKEN, Reloader
from router.telemetry.metrics import RouterMetrics
from tests.support.waiting import START_S, eventually


async def test_one_that_cannot_be_taken_over_does_not_keep_out_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Through a bug, say: the router read none any more, and did not say so."""
    taken: list[RouterConfig] = []

    def take(config: RouterConfig) -> list[str]:
        taken.append(config)
        if len(taken) == 1:
            raise ZeroDivisionError
        return []

    metrics = RouterMetrics(CollectorRegistry())
    reloader = Reloader(RouterConfig, take, metrics)
    running = asyncio.create_task(reloader.run())
    try:
        for outcome in (REFUSED, TAKEN):
            reloader.ask()
            counted = metrics.reloads.labels(outcome)
            await eventually(lambda counted=counted: counted.value == 1, outcome)
    finally:
        running.cancel()
    assert "ZeroDivisionError" in caplog.text


def test_one_that_asks_while_the_router_starts_is_heard_once_it_runs() -> None:
    """`systemctl reload` is allowed while tokenizers are loaded; it ended the router, as the system
    has it for SIGHUP."""
    ended = subprocess.run(
        [sys.executable, "-c", _ASKED_AT_THE_START], timeout=START_S, check=False
    )
    assert ended.returncode == 0


_ASKED_AT_THE_START = """
import os, signal
from router.config.schema import RouterConfig
from router.index.index import PrefixIndex
from router.serve.server import ConfigSource, run

config = RouterConfig.model_validate({"server": {"port": 0}, "models": [{"name": "m"}]})

def new_index(*arguments, **options):
    os.kill(os.getpid(), signal.SIGHUP)
    return PrefixIndex(*arguments, **options)

def read():
    os.kill(os.getpid(), signal.SIGTERM)
    return config

raise SystemExit(run(config, new_index, ConfigSource(read, None)))
"""


def test_one_that_asks_while_python_imports_the_router_is_heard_once_it_runs() -> None:
    """A supervisor does not know how far the process is, which is its own from `exec` on."""
    ended = subprocess.run(
        [sys.executable, "-c", _ASKED_AT_AN_IMPORT], timeout=START_S, check=False
    )
    assert ended.returncode == 0


_ASKED_AT_AN_IMPORT = """
import os, signal, sys
from router.config.schema import RouterConfig

class Asking:
    def find_spec(self, name, path=None, target=None):
        if name == "router.cli.serve_command":
            os.kill(os.getpid(), signal.SIGHUP)

read, texts = RouterConfig.from_yaml, []

def from_yaml(text, *more):
    texts.append(text)
    if len(texts) == 2:  # the configuration is read again
        os.kill(os.getpid(), signal.SIGTERM)
    return read(text, *more)

RouterConfig.from_yaml = from_yaml
sys.meta_path.insert(0, Asking())
sys.argv = ["kvroute", "serve", "--port", "0"]
from router.cli.main import main
raise SystemExit(main())
"""
