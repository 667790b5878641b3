"""Runs every test that asks for an index on each implementation."""

from __future__ import annotations

import pytest

from router.index import PrefixIndex
from tests.router.index.implementations import IMPLEMENTATIONS, Implementation


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda implementation: implementation.name)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    """One of those there are."""
    found: Implementation = request.param
    return found


@pytest.fixture
def index(implementation: Implementation) -> PrefixIndex:
    """An empty index."""
    return implementation.create(None)
