"""Who has a stored response: learned, looked for, and bounded."""

from __future__ import annotations

import json

import pytest

from router.errors import UnknownResponse
from router.routing import stored_responses
from router.routing.key_holders import ResponseOwner
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


# --- whose they are -------------------------------------------------------------------------------


@pytest.mark.parametrize("body", ['{"input": "x"}', "{}", ' {"input": {"a": {}}} \n', "{ }"])
def test_a_response_gets_a_name_that_only_its_key_gives(body: str) -> None:
    """So that nobody has to remember whose it is, and a restart forgets nothing."""
    a, b = ResponseOwner(b"key-a"), ResponseOwner(b"key-b")
    named = json.loads(a.name_response(body.encode()))
    name = named.pop("request_id")
    assert named == json.loads(body)
    ResponseOwner(b"key-a").check(name)
    for other in (b, ResponseOwner(b"")):
        with pytest.raises(UnknownResponse):
            other.check(name)
    assert name != json.loads(a.name_response(body.encode()))["request_id"]


def test_a_name_that_the_client_has_chosen_does_not_count() -> None:
    """With it, one key's holder could take the place of another's response."""
    body = b'{"request_id": "resp_victims", "\\u0072equest_id": "resp_other"}'
    assert json.loads(ResponseOwner(b"a").name_response(body))["request_id"] not in (
        *("resp_victims", "resp_other"),
    )


def test_made_up_names_are_nobodys() -> None:
    """Short, long, without a seal, with that of another name, in other letters."""
    owner = ResponseOwner(b"key-a")
    one, two = (json.loads(owner.name_response(b"{}"))["request_id"] for _ in range(2))
    swapped, upper = one[:37] + two[37:], one[:5] + one[5:].upper()
    for name in ("", "resp_1", one[:-1], one + "0", swapped, upper, f"{one}\n", one[5:]):
        with pytest.raises(UnknownResponse):
            owner.check(name)
