"""What the data plane may decide without Python, and by what: told to the core whenever it changes.

Only completions of token ids, and only where nothing has to be known of them that the core does
not know. Everything else is asked here, as ever. A change of a replica reaches the core at once,
any other within `REFRESH_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from async_timeout import timeout
from typing_extensions import override

from router.config import RouterConfig
from router.index import SourceId
from router.mirror.native import NativeMirror
from router.plane import Addresses, DataPlane
from router.replicas import (
    EventSource,
    Replica,
    ReplicaListener,
    ReplicaState,
    ServedModels,
)
from router.replicas.core_load import CoreLoadTracker
from router.routing.core_planner import CorePlanner
from router.routing.lengths import longest_certain
from router.routing.models import Model
from router.tokenize import PromptLimits

if TYPE_CHECKING:
    from router._core import Placing
    from router.service import RouterService

REFRESH_S = 0.05
_ANY_LENGTH = PromptLimits().max_prompt_tokens


class Parts(NamedTuple):
    """What decides, in the core."""

    planner: CorePlanner
    mirror: NativeMirror
    load: CoreLoadTracker


class NativeDecisions(ReplicaListener):
    """Keeps the core's picture of the fleet true. Belongs to one event loop."""

    def __init__(
        self, service: RouterService, parts: Parts, addresses: Addresses, shows_hits: bool
    ) -> None:
        """
        Args:
            service: Whose models and replicas are served.
            parts: Of its decisions.
            addresses: Of replicas' hosts.
            shows_hits: Whether clients are told how much of a prompt is cached.
        """
        self._shows_hits = shows_hits
        self._service = service
        self._parts = parts
        self._addresses = addresses
        core = import_module("router._core")
        self._placing: Placing = core.Placing(
            *(parts.load.books, parts.mirror.core, parts.planner.decider),
            service.config.events.self_repair_quiet_s,
        )
        service.observers.repair.quiet.count_also(self._placing)
        self._told: Any = None
        self._is_on = False
        self._has_changed = asyncio.Event()
        service.registry.subscribe(self)

    def under_way(self) -> int:
        """Requests that the core has placed and that have not ended."""
        return self._placing.under_way()

    async def run(self, plane: DataPlane) -> None:
        """Keep it true until cancelled."""
        while True:
            self._has_changed.clear()
            self._refresh(plane)
            with contextlib.suppress(asyncio.TimeoutError):
                async with timeout(REFRESH_S):
                    await self._has_changed.wait()

    @override
    def on_state_changed(self, replica: Replica, before: ReplicaState) -> None:
        self._has_changed.set()

    @override
    def on_models_changed(self, replica: Replica, before: ServedModels) -> None:
        self._has_changed.set()

    @override
    def on_removed(self, replica: Replica) -> None:
        self._has_changed.set()

    @override
    def on_unresponsive(self, replica: Replica, for_s: float) -> None:
        """It is not healthy already."""

    @override
    def on_sources_changed(self, replica: Replica, before: tuple[EventSource, ...]) -> None:
        self._has_changed.set()

    def stop(self, plane: DataPlane) -> None:
        """From now on everything is asked here."""
        plane.plane.decide_by(None)
        self._is_on = False

    def _refresh(self, plane: DataPlane) -> None:
        admission, observers = self._service.admission, self._service.observers
        may = not (admission.is_full or observers.taps or admission.is_shutting_down)
        if may != self._is_on:
            self._is_on = may
            plane.plane.decide_by(self._placing if may else None)
        if may:
            self._tell()

    def _tell(self) -> None:
        models, caches, told = [], {}, []
        for model in self._service.models:
            found = self._served(model)
            if found is None:
                continue
            name, fields, seen, numbers = found
            models.append((name, *fields))
            caches.update(numbers)
            told.append((name, seen))
        if told == self._told:
            return
        self._told = told
        none = 2**32 - 1
        in_mirror = [none] * (max(caches, default=-1) + 1)
        for number, other in caches.items():
            in_mirror[number] = other
        self._placing.serve(models, in_mirror)

    def _served(self, model: Model) -> tuple[str, Any, Any, dict[int, int]] | None:
        """What the core is told of a model, what that depends on, and the mirror's numbers of its
        caches; None where Python has to look at its requests."""
        index, planner = model.index, self._parts.planner
        replicas = list(self._service.registry.serving(model.name))
        if not replicas or model.aliases:
            return None
        if self._is_closely_watched(model, replicas):
            return None
        if index.searches:
            return None
        ways = [self._way(replica) for replica in replicas]
        if any(way is None for way in ways):
            return None
        fleet = planner.fleet_of(model.name, replicas, index)
        longest = longest_certain(replicas, model.name) or _ANY_LENGTH
        caches = {
            self._parts.load.books.cache_id(*source): self._parts.mirror.number_of(source)
            for source in fleet.caches
        }
        number = self._parts.mirror.number_of_model(model.name)
        first_byte_s = self._service.config.server.timeouts.first_byte_s
        fields = (
            *(model.name, number, fleet.core, index.shared, ways, longest),
            *(None, first_byte_s, False),
        )
        return model.name, fields, (fleet, ways, longest), caches

    def _is_closely_watched(self, model: Model, replicas: Sequence[Replica]) -> bool:
        """Whether something is said to engines, or estimated of them, that is made in Python."""
        approximate = self._service.approximate
        silent = () if approximate is None else approximate.silent
        return any(
            replica.priority_order is not None
            or replica.peer_address is not None
            or model.hint_form(replica) is not None
            or not replica.sources
            or SourceId(replica.id) in silent
            for replica in replicas
        )

    def _way(self, replica: Replica) -> tuple[Any, ...] | None:
        """As `Placing` takes it; None where it is not known yet, or may not be gone."""
        origin, times = replica.origin, self._service.config.server.timeouts
        hosts = self._addresses.latest(origin.host)
        if origin.allows is not None:
            hosts = [host for host in hosts if origin.allows(host)]
        if not hosts:
            return None
        secure_host = origin.host if origin.tls else ""
        return (
            *(origin.key, tuple(hosts), origin.port, secure_host),
            *(origin.host_header, origin.target_prefix),
            tuple(replica.headers),
            ((b"x-kv-replica", replica.id.encode()),),
            (times.connect_s, times.whole_response_s, times.idle_s),
            self._shows_hits,
            "",
        )


def native_decisions(
    service: RouterService, addresses: Addresses, shows_hits: bool
) -> NativeDecisions | None:
    """What decides in the core; None where the configuration asks for more than that knows.

    Args:
        service: Whose requests are decided.
        addresses: Of replicas' hosts.
        shows_hits: Whether clients are told of hits.
    """
    parts = service.parts_in_core
    is_shared = service.exchange is not None or service.tracing is not None
    if parts is None or is_shared or _asks_for_more(service.config):
        return None
    return NativeDecisions(service, Parts(*parts), addresses, shows_hits)


def _asks_for_more(config: RouterConfig) -> bool:
    """Whether requests are told apart, put in line, traced or logged one by one."""
    server = config.server
    asked: Sequence[Callable[[], object] | object] = (
        server.client_keys,
        server.trusted_proxies,
        server.trust_client_rank,
        config.overload.is_queueing,
        config.observability.access_log,
        config.versioned_models,
        config.owns_priority,
    )
    return any(asked)
