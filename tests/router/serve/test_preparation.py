"""Prompts of requests that the data plane holds: which are placed, and what is kept of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router.config.models import ModelConfig
from router.config.routing import OverloadConfig
from router.config.watch import HealthConfig
from router.doors.terms_reader import TermsReader
from router.fleet.entrance import EngineOrder
from router.fleet.load import LoadTracker
from router.fleet.registry import ReplicaRegistry
from router.fleet.watchers import Watchers
from router.policies import make_policy
from router.prompt.processes import LargeWork
from router.routing.dispatcher import Dispatcher
from router.routing.models import ModelSet
from router.routing.planner import Known, RoutePlanner
from router.routing.stored_responses import StoredResponses
from router.serve.seams.prepare import Preparation
from tests.support.model_files import write_byte_tokenizer
from tests.support.waiting import eventually

COMPLETIONS = 0


class Held:
    """Notes what is said of requests that the core holds."""

    def __init__(self) -> None:
        self.placed: list[int] = []
        self.opened: list[int] = []

    def place(self, number: int, *_what: object) -> None:
        self.placed.append(number)

    def open(self, number: int) -> None:
        self.opened.append(number)


async def _nothing(*_arguments: object) -> Any:
    raise ConnectionError


@pytest.fixture
async def preparation(tmp_path: Path) -> AsyncIterator[Preparation]:
    """The only model has a tokenizer of its own."""
    write_byte_tokenizer(tmp_path)
    load, health, large_work = LoadTracker(), HealthConfig(), LargeWork()
    registry = ReplicaRegistry(Watchers(_nothing, health, load), health, load)
    models = ModelSet([ModelConfig(name="m", tokenizer=str(tmp_path))], _nothing)
    planner = RoutePlanner(make_policy("prefix"), Known(load))
    responses = StoredResponses(_nothing)
    dispatcher = Dispatcher(models, registry, planner, "prefix", responses, large_work)
    order = EngineOrder(OverloadConfig())
    reader = TermsReader(b"x-session-id", None, trusts_rank=False)
    yield Preparation(dispatcher, None, None, None, reader, None, order)
    await registry.close()
    models.close()
    large_work.close()


async def test_nothing_is_placed_for_a_client_that_left_while_its_prompt_was_tokenised(
    preparation: Preparation,
) -> None:
    """Its end is over: what was kept of the prompt for it would be kept for good."""
    held: Any = Held()
    preparation.plane = held
    body = json.dumps({"model": "m", "prompt": "x" * 50_000}).encode()
    for number in (1, 2):
        preparation.prepare(number, COMPLETIONS, [], body)
    assert preparation.under_way == 2, "a long prompt is tokenised in a thread"
    preparation.left(1)
    await eventually(lambda: not preparation.under_way, "both are tokenised")
    assert (held.placed, held.opened) == ([2], [])
