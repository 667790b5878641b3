"""Runs the tests of a module that asks for it on each implementation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.router.mirror.implementations import IMPLEMENTATIONS, choose


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """One of them is chosen."""
    choose(request.param)
    yield
    choose("python")
