"""Who has a stored response: learned, looked for, and bounded."""

from __future__ import annotations

import pytest

from router.routing import stored_responses
from tests.router.routing.test_dispatcher import Setting, setting

__all__ = ["setting"]


async def test_the_one_used_longest_ago_is_forgotten_first(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every response brings an id, for as long as the router runs."""
    monkeypatch.setattr(stored_responses, "MAX_RESPONSES", 2)
    replicas = {name: setting.add(name) for name in ("r0", "r1")}
    known = setting.responses
    for name in ("a", "b"):
        known.learn(name, "r1")
    assert await known.holder("a", replicas) is replicas["r1"]
    known.learn("c", "r1")
    assert known.statistics().known == 2
    assert await known.holder("a", replicas) is replicas["r1"]
    assert setting.asked == []
    assert await known.holder("b", replicas) is None
    assert len(setting.asked) == 2


async def test_nobody_is_asked_where_there_is_no_choice_or_no_such_id(setting: Setting) -> None:
    """Ids go into the path of a request: nothing else may."""
    one = {"r0": setting.add("r0")}
    assert await setting.responses.holder("resp_1", one) is None
    two = {**one, "r1": setting.add("r1")}
    for odd in ("../metrics", "a b", "x?y", "", "a" * 300, "resp\r\n"):
        assert await setting.responses.holder(odd, two) is None
    assert setting.asked == []


async def test_what_was_learned_of_a_removed_replica_does_not_count(setting: Setting) -> None:
    """Its responses are gone with it; another may have been started from the same store."""
    replicas = {name: setting.add(name) for name in ("r0", "r1")}
    setting.responses.learn("resp_1", "gone")
    setting.holders.add(("r1", "resp_1"))
    assert await setting.responses.holder("resp_1", replicas) is replicas["r1"]
    statistics = setting.responses.statistics()
    assert (statistics.asked, statistics.found) == (1, 1)
