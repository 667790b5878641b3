"""Loads the plug-in `kvroute-vllm` for one test."""

from __future__ import annotations

from typing import Any

import pytest
import vllm
from vllm.distributed.kv_events import EventPublisherFactory
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.engine import core

from kvroute_vllm.recognition import check_version
from tests.interop.layouts import Layout

UNPATCHED: Any = SingleTypeKVCacheManager.cache_blocks


def unplug_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the plug-in replaces from now on is vLLM's own again when the test ends.

    The configuration goes on accepting a publisher of that name, which nothing then makes.
    """
    for owner, name in (
        (SingleTypeKVCacheManager, "cache_blocks"),
        (Scheduler, "_mamba_block_aligned_split"),
        (Scheduler, "__init__"),
        (core, "init_none_hash"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    registry = dict(EventPublisherFactory._registry)
    monkeypatch.setattr(EventPublisherFactory, "_registry", registry)


def skip_unknown_drafters(layout: Layout) -> None:
    """Before vLLM 0.32 a drafter's look-ups end one token earlier, which no event says."""
    if layout.eagle and check_version(vllm.__version__) < (0, 32):
        pytest.skip("hits with a drafter are known from vLLM 0.32 on")
