"""What every test of the index is given."""

from __future__ import annotations

import pytest

from router.index.index import PrefixIndex
from tests.router.index.implementations import CORE, Implementation


@pytest.fixture
def implementation() -> Implementation:
    """Makes indexes."""
    return CORE


@pytest.fixture
def index() -> PrefixIndex:
    """An empty index."""
    return PrefixIndex()
