"""The registry follows the providers; what an operator does by hand stands."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from router.config.replica import ReplicaConfig
from router.config.watch import HealthConfig
from router.fleet.discovery.keeper import CONFIGURATION, ReplicaKeeper
from router.fleet.discovery.provider import ProviderListener
from router.fleet.load import LoadTracker
from router.fleet.registry import ReplicaRegistry
from router.fleet.watchers import Watchers
from tests.support.waiting import eventually


class Setting:
    """A registry whose replicas never respond, and a keeper."""

    def __init__(self, linger_s: float = 3600.0) -> None:
        self.now = 0.0
        health, load = HealthConfig(), LoadTracker()
        self.registry = ReplicaRegistry(Watchers(_no_response, health, load), health, load)
        self.keeper = ReplicaKeeper(self.registry, linger_s, lambda: self.now, restart_s=0.01)

    def states(self) -> dict[str, str]:
        return {replica.id: replica.state.value for replica in self.registry.replicas()}

    def take(self, *names: str, provider: str = CONFIGURATION) -> None:
        self.keeper.take(provider, [replica(name) for name in names])


def replica(name: str, host: str | None = None, **more: object) -> ReplicaConfig:
    return ReplicaConfig.model_validate({"url": f"http://{host or name}:1", "id": name, **more})


async def _no_response(*_arguments: object) -> tuple[int, bytes]:
    raise ConnectionError


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    made = Setting()
    yield made
    await made.keeper.close()
    await made.registry.close()


async def test_what_is_named_is_added_and_what_is_not_drains_before_it_goes(
    setting: Setting,
) -> None:
    """A replica that comes back within the time still has its index."""
    setting.take("a", "b")
    assert setting.states() == {"a": "starting", "b": "starting"}
    before = setting.registry.get("b")
    setting.take("a")
    assert setting.states() == {"a": "starting", "b": "draining"}
    setting.take("a", "b")
    assert setting.states() == {"a": "starting", "b": "starting"}
    assert setting.registry.get("b") is before
    setting.take("a")
    setting.now += 3599
    setting.take("a")
    assert "b" in setting.registry
    setting.now += 2
    setting.take("a")
    assert "b" not in setting.registry


async def test_without_another_report_it_goes_by_itself() -> None:
    """Providers report changes, not the passing of time."""
    setting = Setting(linger_s=0.05)
    loop = asyncio.get_running_loop()
    setting.keeper = ReplicaKeeper(setting.registry, 0.05, clock=loop.time)
    setting.take("a", "b")
    setting.take("a")
    await eventually(lambda: "b" not in setting.registry, "removed")
    assert setting.states() == {"a": "starting"}
    await setting.keeper.close()
    await setting.registry.close()


async def test_several_providers_share_the_registry(setting: Setting) -> None:
    """What one ceases to name stays while another names it; the first to name it configures it."""
    setting.keeper.take(CONFIGURATION, [replica("a", speed=2.0)])
    setting.keeper.take("file f", [replica("a", speed=3.0), replica("b")])
    assert setting.registry.get("a").config.speed == 2.0
    setting.take()
    assert setting.states() == {"a": "starting", "b": "starting"}
    assert setting.registry.get("a").config.speed == 3.0
    setting.keeper.take("file f", [])
    assert setting.states() == {"a": "draining", "b": "draining"}


async def test_what_an_operator_did_stands(setting: Setting) -> None:
    """One that he drained stays drained, one that he removed stays away, one that he added is his.
    When the provider has ceased to name it, it may come again."""
    setting.registry.add(replica("mine"))
    setting.take("a", "b")
    setting.registry.drain("a")
    setting.take("b")
    setting.take("a", "b")
    assert setting.states()["a"] == "draining"
    setting.registry.remove("b")
    setting.take("a", "b")
    assert "b" not in setting.registry
    setting.take("a")
    setting.take("a", "b")
    assert "b" in setting.registry
    assert "mine" in setting.registry


async def test_other_options_keep_the_index_and_another_place_does_not(setting: Setting) -> None:
    """Speed, key and limit change in place; another address is another process."""
    setting.keeper.take(CONFIGURATION, [replica("a", speed=1.0)])
    before = setting.registry.get("a")
    changed = replica("a", speed=2.0, api_key="k", max_concurrent_requests=3)
    setting.keeper.take(CONFIGURATION, [changed])
    assert setting.registry.get("a") is before
    assert before.config is changed
    assert before.headers == ((b"authorization", b"Bearer k"),)
    setting.keeper.take(CONFIGURATION, [replica("a", "elsewhere")])
    assert setting.registry.get("a") is not before
    assert str(setting.registry.get("a").origin) == "http://elsewhere:1"


async def test_one_that_an_operator_puts_in_place_of_a_named_one_is_his(setting: Setting) -> None:
    """No report need come between the two: a file is read again only when it changes."""
    setting.take("a", "b")
    setting.registry.remove("a")
    own = setting.registry.add(replica("a", "elsewhere"))
    setting.keeper.take(CONFIGURATION, [replica("a", speed=2.0), replica("b")])
    assert own.config.speed == 1.0
    setting.keeper.take(CONFIGURATION, [replica("a", models=["m"]), replica("b")])
    setting.take("b")
    assert setting.registry.get("a") is own
    assert setting.states() == {"a": "starting", "b": "starting"}


async def test_one_that_is_drained_while_it_is_not_named_stays_drained(setting: Setting) -> None:
    """A pod whose readiness comes and goes is drained by hand when it is away as well."""
    setting.take("a", "b")
    setting.take()
    setting.registry.drain("a")
    setting.registry.undrain("b")
    assert setting.states() == {"a": "draining", "b": "starting"}
    setting.take("a", "b")
    assert setting.states() == {"a": "draining", "b": "starting"}
    setting.take()
    setting.take("a", "b")
    assert setting.states() == {"a": "draining", "b": "starting"}
    setting.registry.undrain("a")
    assert setting.states() == {"a": "starting", "b": "starting"}


async def test_a_drained_replica_stays_drained_when_its_models_or_events_change(
    setting: Setting,
) -> None:
    """Its cache is another, but it is the same process that the operator wants no requests for;
    at another address it is another process."""
    setting.keeper.take(CONFIGURATION, [replica("a")])
    before = setting.registry.drain("a")
    setting.keeper.take(CONFIGURATION, [replica("a", models=["m"])])
    assert setting.registry.get("a") is not before
    assert setting.states() == {"a": "draining"}
    events = [{"endpoint": "tcp://a:5557"}]
    setting.keeper.take(CONFIGURATION, [replica("a", models=["m"], kv_events=events)])
    assert setting.states() == {"a": "draining"}
    setting.registry.undrain("a")
    setting.keeper.take(CONFIGURATION, [replica("a")])
    assert setting.states() == {"a": "starting"}
    setting.registry.drain("a")
    setting.keeper.take(CONFIGURATION, [replica("a", "elsewhere")])
    assert setting.states() == {"a": "starting"}


async def test_one_that_ceased_to_be_named_is_not_drained_by_its_other_options(
    setting: Setting,
) -> None:
    """It was the keeper that drained it, so it gets requests once it is named again."""
    setting.take("a")
    setting.take()
    assert setting.states() == {"a": "draining"}
    setting.keeper.take(CONFIGURATION, [replica("a", models=["m"])])
    assert setting.states() == {"a": "starting"}


async def test_addresses_that_change_hands_are_no_conflict(setting: Setting) -> None:
    """Two that swap theirs in one report, and a new one at the address of one that left."""
    setting.keeper.take(CONFIGURATION, [replica("a", "x"), replica("b", "y")])
    setting.keeper.take(CONFIGURATION, [replica("a", "y"), replica("b", "x")])
    urls = {found.id: str(found.origin) for found in setting.registry.replicas()}
    assert urls == {"a": "http://y:1", "b": "http://x:1"}
    setting.keeper.take(CONFIGURATION, [replica("c", "y"), replica("b", "x")])
    assert set(setting.states()) == {"b", "c"}
    assert not setting.keeper.refused


async def test_a_replica_in_the_way_is_told_once(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    """An address that an operator's own replica has; when that is gone, the named one is added."""
    setting.registry.add(replica("mine", "x"))
    with caplog.at_level(logging.WARNING, "router.fleet.discovery"):
        for _ in range(3):
            setting.keeper.take(CONFIGURATION, [replica("a", "x")])
    assert [record.getMessage() for record in caplog.records] == [
        f"discovery: replica a cannot be added: {setting.keeper.refused['a']}"
    ]
    setting.registry.remove("mine")
    setting.keeper.take(CONFIGURATION, [replica("a", "x")])
    assert set(setting.states()) == {"a"}
    assert not setting.keeper.refused


async def test_a_failure_keeps_the_list_and_is_told_when_it_changes(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    """A name server that is away for an hour must not write a line a second."""
    setting.take("a", provider="dns x")
    with caplog.at_level(logging.INFO, "router.fleet.discovery"):
        for why in ("away", "away", "refused"):
            setting.keeper.fail("dns x", why)
        setting.take("a", provider="dns x")
    assert [record.getMessage() for record in caplog.records] == [
        "discovery: dns x: away; its 1 replicas stay",
        "discovery: dns x: refused; its 1 replicas stay",
        "discovery: dns x: sound again",
    ]
    found = setting.keeper.statistics()["dns x"]
    assert (found.replicas, found.reports, found.failures, found.error) == (1, 2, 3, None)


class Provider:
    """Reports what it is told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.listener: ProviderListener | None = None
        self.error: Exception | None = None
        self._ended = asyncio.Event()

    async def follow(self, listener: ProviderListener) -> None:
        self.listener = listener
        await self._ended.wait()
        self.listener = None
        self._ended.clear()
        assert self.error is not None
        raise self.error

    def end(self, error: Exception) -> None:
        self.error = error
        self._ended.set()


async def test_the_replicas_of_a_provider_that_is_configured_away_leave(setting: Setting) -> None:
    """Those of one that stays are kept until it reports again."""
    one, other = Provider("one"), Provider("other")
    setting.keeper.follow_only([one, other])
    await eventually(lambda: one.listener and other.listener, "both are followed")
    assert setting.keeper.waits_for() == ["one", "other"]
    assert one.listener is not None
    assert other.listener is not None
    one.listener.on_replicas([replica("a")])
    other.listener.on_replicas([replica("b")])
    assert setting.keeper.waits_for() == []
    again = Provider("one")
    setting.keeper.follow_only([again])
    assert setting.states() == {"a": "starting", "b": "draining"}
    await eventually(lambda: again.listener, "followed again")


async def test_a_provider_that_ends_is_told_and_followed_again(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be a bug, and without that its list would never change again."""
    provider = Provider("odd")
    setting.keeper.follow_only([provider])
    provider.end(ZeroDivisionError("x"))
    await eventually(lambda: setting.keeper.statistics()["odd"].error, "noted")
    assert setting.keeper.statistics()["odd"].error == "it ended: ZeroDivisionError"
    assert any(record.levelno == logging.CRITICAL for record in caplog.records)
    await eventually(lambda: provider.listener, "followed again")
    assert provider.listener is not None
    provider.listener.on_replicas([replica("a")])
    assert setting.states() == {"a": "starting"}
    assert setting.keeper.statistics()["odd"].error is None
