"""Makes the registry follow what providers report: new replicas are added, those that none names
any more are drained, and removed when they have been away for a while.

An operator's actions stand: a drained replica stays drained, and a removed one stays away until its
provider has ceased to name it. Replicas that the operator added are not touched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from kvevents.field_docs import counter, flag, gauge
from router.config.discovery import DiscoveryConfig
from router.config.origin import Origin
from router.config.replica import ReplicaConfig
from router.errors import RouterError
from router.fleet.discovery.dns import DnsProvider
from router.fleet.discovery.file import FileProvider
from router.fleet.discovery.kubernetes import KubernetesProvider
from router.fleet.discovery.provider import MAX_RETRY_S, ReplicaProvider
from router.fleet.registry import ReplicaRegistry
from router.fleet.replica import Replica

logger = logging.getLogger(__name__)

_ERROR_CHARACTERS = 1000
_TRY_AGAIN_S = 5.0
"""The delay after a replica could not be added: another may be in its way for a while."""

CONFIGURATION = "configuration"
"""The name of the provider that stands for `replicas` in the configuration."""


@dataclass(frozen=True, slots=True)
class ProviderStatistics:
    """The state of one provider."""

    replicas: Annotated[int, gauge("kvroute_discovery_replicas")]
    """Replicas that a provider names; `configuration` stands for `replicas`."""
    reports: Annotated[int, counter("kvroute_discovery_reports")]
    """Lists of replicas that a provider reported."""
    failures: Annotated[int, counter("kvroute_discovery_failures")]
    """Times a provider could not list its replicas."""
    error: Annotated[
        str | None,
        flag(
            "kvroute_discovery_failing",
            "1 while a provider cannot list all of its replicas.",
        ),
    ]
    """Why it cannot; None if it can."""


@dataclass(slots=True)
class _ProviderState:
    """Holds one provider's report."""

    replicas: Mapping[str, ReplicaConfig] = field(default_factory=dict)
    reports: int = 0
    failures: int = 0
    error: str | None = None


@dataclass(slots=True)
class _ManagedReplica:
    """A replica that is in the registry because a provider named it."""

    config: ReplicaConfig
    replica: Replica
    leaves_at: float | None = None
    """When it will be removed; None while it is named."""


@dataclass(eq=False, repr=False)
class ReplicaKeeper:
    """Adds and removes replicas for the providers. Belongs to one event loop."""

    registry: ReplicaRegistry
    linger_s: float = 30.0
    """How long a replica that is no longer named is kept, draining."""
    clock: Callable[[], float] = time.monotonic
    restart_s: float = MAX_RETRY_S
    """When to follow a provider again that has ended, as none should."""

    def __post_init__(self) -> None:
        self._provided: dict[str, _ProviderState] = {CONFIGURATION: _ProviderState()}
        self._kept: dict[str, _ManagedReplica] = {}
        self._dismissed: set[str] = set()
        """Replicas that an operator removed while a provider names them."""
        self._drained: dict[str, Origin] = {}
        """Addresses of drained replicas that are about to be added with another cache, by id."""
        self._refused: dict[str, str] = {}
        """Why a replica that is named could not be added."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    # --- providers --------------------------------------------------------------------------------

    def follow_only(self, providers: Sequence[ReplicaProvider]) -> None:
        """Follow these providers from now on, and no others. Of one that was followed before, the
        last list stays until it reports again.

        Args:
            providers: Each with a name of its own.
        """
        for task in self._tasks.values():
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        names = [CONFIGURATION, *(provider.name for provider in providers)]
        self._provided = {name: self._provided.get(name, _ProviderState()) for name in names}
        self._tasks = {
            provider.name: asyncio.create_task(
                self._follow(provider), name=f"discovery: {provider.name}"
            )
            for provider in providers
        }
        self._reconcile()

    def take(
        self, provider: str, replicas: Sequence[ReplicaConfig], broken: Sequence[str] = ()
    ) -> None:
        """Take over the complete list of one provider.

        Args:
            replicas: All of its replicas; of those with one id the first counts.
        """
        provided = self._provided.setdefault(provider, _ProviderState())
        provided.reports += 1
        error = "; ".join(broken)[:_ERROR_CHARACTERS] or None
        if error is not None and error != provided.error:
            logger.warning("discovery: %s: left out: %s", provider, error)
        elif error is None and provided.error is not None:
            logger.info("discovery: %s: sound again", provider)
        provided.error = error
        provided.replicas = {replica.replica_id: replica for replica in reversed(replicas)}
        self._reconcile()

    def fail(self, provider: str, why: str) -> None:
        """Note that a provider cannot list its replicas; its last list stays."""
        provided = self._provided.setdefault(provider, _ProviderState())
        provided.failures += 1
        if provided.error != why:
            logger.warning(
                "discovery: %s: %s; its %d replicas stay", provider, why, len(provided.replicas)
            )
        provided.error = why

    def named(self) -> Collection[str]:
        """Ids of the replicas that a provider names."""
        return {name for found in self._provided.values() for name in found.replicas}

    def waits_for(self) -> list[str]:
        """The providers that have not reported a list yet."""
        return [name for name in self._tasks if not self._provided[name].reports]

    def statistics(self) -> dict[str, ProviderStatistics]:
        return {
            name: ProviderStatistics(
                len(found.replicas), found.reports, found.failures, found.error
            )
            for name, found in self._provided.items()
        }

    @property
    def refused(self) -> Mapping[str, str]:
        """The reasons why named replicas could not be added, by id."""
        return self._refused

    async def close(self) -> None:
        """Follow no provider any more. The replicas stay as they are."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = {*self._tasks.values(), *self._ending}
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _follow(self, provider: ReplicaProvider) -> None:
        while True:
            try:
                await provider.follow(_NamedListener(self, provider.name))
            except Exception as error:
                logger.critical("discovery: %s ended", provider.name, exc_info=error)
                self.fail(provider.name, f"it ended: {type(error).__name__}")
            await asyncio.sleep(self.restart_s)

    # --- steps ------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        """Make the registry what the providers report."""
        self._note_dismissed()
        wanted: dict[str, ReplicaConfig] = {}
        for provided in self._provided.values():
            for replica_id, config in provided.replicas.items():
                wanted.setdefault(replica_id, config)
        self._dismissed &= wanted.keys()
        self._drained = {name: at for name, at in self._drained.items() if name in wanted}
        self._refused = {name: why for name, why in self._refused.items() if name in wanted}
        for replica_id in [name for name in self._kept if name not in wanted]:
            self._leave(replica_id, self._kept[replica_id])
        # Those that move make way for each other before any is added.
        for replica_id, kept in list(self._kept.items()):
            if replica_id in wanted:
                self._stay(replica_id, kept, wanted[replica_id])
        for replica_id, config in wanted.items():
            if replica_id not in self._kept and replica_id not in self._dismissed:
                self._add(config)
        self._remove_due()

    def _note_dismissed(self) -> None:
        # An operator's own may have taken the id since.
        here = frozenset(self.registry.replicas())
        for replica_id in [name for name, kept in self._kept.items() if kept.replica not in here]:
            del self._kept[replica_id]
            self._dismissed.add(replica_id)

    def _leave(self, replica_id: str, kept: _ManagedReplica) -> None:
        if kept.leaves_at is None:
            kept.leaves_at = self.clock() + self.linger_s
            self.registry.suspend(replica_id)
            logger.info("replica %s: no longer named; removed in %g s", replica_id, self.linger_s)

    def _stay(self, replica_id: str, kept: _ManagedReplica, config: ReplicaConfig) -> None:
        if kept.leaves_at is not None:
            kept.leaves_at = None
            self.registry.resume(replica_id)
            logger.info("replica %s: named again", replica_id)
        if config == kept.config:
            return
        if is_same_cache(config, kept.config):
            self.registry.reconfigure(replica_id, config)
            kept.config = config
        else:
            if self.registry.get(replica_id).draining:
                self._drained[replica_id] = kept.config.origin
            self._remove(replica_id)

    def _add(self, config: ReplicaConfig) -> None:
        replica_id = config.replica_id
        self._make_way(config)
        try:
            added = self.registry.add(config)
        except RouterError as error:
            if self._refused.get(replica_id) != str(error):
                logger.warning("discovery: replica %s cannot be added: %s", replica_id, error)
            self._refused[replica_id] = str(error)
        else:
            self._refused.pop(replica_id, None)
            self._kept[replica_id] = _ManagedReplica(config, added)
            if self._drained.pop(replica_id, None) == config.origin:
                self.registry.drain(replica_id)

    def _make_way(self, config: ReplicaConfig) -> None:
        """Remove the replica that leaves this address: another has it now."""
        for replica_id, kept in self._kept.items():
            if kept.leaves_at is not None and kept.config.origin == config.origin:
                self._remove(replica_id)
                return

    def _remove_due(self) -> None:
        """Remove replicas that have been away for long enough, and schedule the next."""
        now = self.clock()
        for replica_id, kept in list(self._kept.items()):
            if kept.leaves_at is not None and kept.leaves_at <= now:
                self._remove(replica_id)
        times = [kept.leaves_at for kept in self._kept.values() if kept.leaves_at is not None]
        if self._refused:
            times.append(now + _TRY_AGAIN_S)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if times:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(min(times) - now, 0.001), self._reconcile)

    def _remove(self, replica_id: str) -> None:
        del self._kept[replica_id]
        self.registry.remove(replica_id)


def make_providers(config: DiscoveryConfig, environ: Mapping[str, str]) -> list[ReplicaProvider]:
    return [
        *(FileProvider(each, environ) for each in config.files),
        *(DnsProvider(each) for each in config.dns),
        *(KubernetesProvider(each, environ) for each in config.kubernetes),
    ]


class _NamedListener:
    """Passes on a provider's reports, with its name."""

    def __init__(self, keeper: ReplicaKeeper, provider: str) -> None:
        self.on_replicas = partial(keeper.take, provider)
        self.on_failure = partial(keeper.fail, provider)


def is_same_cache(one: ReplicaConfig, other: ReplicaConfig) -> bool:
    """Return whether two configurations of a replica are about the same process and its events, so
    that the state of its cache stays true."""
    return (one.url, one.models, one.kv_events) == (other.url, other.models, other.kv_events)
