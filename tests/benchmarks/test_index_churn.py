"""The memory of an index under churn; `make bench` runs the same a hundred times as long."""

from __future__ import annotations

import sys

import pytest

from benchmarks.index_churn import Churn
from router.index.base import SourceLimits
from tests.router.index.implementations import CORE

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="resident memory is read from /proc"
)


def test_an_index_that_never_rests_takes_no_more_memory_the_longer_it_runs() -> None:
    """Blocks, copies, waiting runs, tiers and sources come and go for months."""
    index = CORE.create(SourceLimits(waiting_runs=16, waiting_batches=50, forgotten=256))
    churn = Churn(index, sources=70, runs=4)
    early = list(churn.samples(240_000, count=4))[-1]  # what is remembered is full by then
    late = list(churn.samples(120_000, count=8))
    assert early.blocks > 10_000
    assert max(sample.blocks for sample in late) < early.blocks * 1.2
    assert max(sample.table_bytes for sample in late) <= early.table_bytes * 1.3
    CORE.expect_sound(index)
    left = churn.drop_all()
    assert left.blocks == 0
    CORE.expect_empty(index)
