"""Updates the core with what it may decide without Python, and by what, whenever that changes.

Those are completions of token ids, and what `prepare.py` has made token ids of. All else is asked
in Python. A change of a replica or of an event stream reaches the core at once; any other is looked
for every `REFRESH_S`, and less often while no request is under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

from async_timeout import timeout

from router._core import Placing
from router._core import Reservations as CoreReservations
from router.config.origin import Header
from router.config.schema import RouterConfig
from router.doors.names import worker_number
from router.errors import UnknownModel
from router.fleet.entrance import EngineOrder, headers_read
from router.fleet.registry import ReplicaListener
from router.fleet.replica import Replica
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.plane.attempts import RANK_HEADER
from router.plane.data_plane import DataPlane
from router.prompt.body.owned_fields import PRIORITY_HEADER, HintForm
from router.prompt.limits import MAX_PROMPT_TOKENS
from router.routing.decision import hint_form
from router.routing.dispatcher import Dispatcher
from router.routing.fleets import KnownFleet
from router.routing.lengths import longest_certain
from router.routing.model import Model
from router.routing.planner import RoutePlanner
from router.telemetry.parts import RouterParts
from router.telemetry.trace_context import TRACEPARENT

logger = logging.getLogger(__name__)

REFRESH_S = 0.05
_QUIET_S = 0.25
"""The interval while no request is under way. Changes then reach the core at once, except bounds
that requests reach."""
_LOOK_AGAIN_S = 0.25
"""The longest time until a change without a notification reaches the core, as of an engine's own
metadata; the next two lengthen it."""
_QUIET_LOOK_AGAIN_S = 2.0
"""The same while no request is under way."""
_LOOKING_SHARE = 0.02
"""The most of the control loop's time that looking may take: it grows with the fleet."""
MAX_ADAPTERS = 256
"""Adapters that the core knows; the one named least recently is forgotten."""


class OrderedBy(IntEnum):
    """Names the field in which an engine that orders its queue reads a request's number; as in
    core/plane/types.hpp."""

    NOTHING = 0
    HEADER = 1
    """vLLM's; the lowest goes first."""
    FIELD = 2
    """A field of the body; likewise."""
    NEGATED_FIELD = 3
    """The highest goes first."""


class AtGateway(NamedTuple):
    """A replica as gateways know it; the core reads it by these names."""

    worker_id: int
    endpoint: str
    address: str
    block_tokens: tuple[tuple[int, int], ...] = ()
    """The tokens of a block, by rank, where its engine has announced them."""


class Way(NamedTuple):
    """How requests for a name reach a replica; the core reads it by these names."""

    origin: str
    """The key of kept connections."""
    hosts: tuple[str, ...]
    port: int
    secure_host: str
    """The host that the replica's certificate must name; empty: plain HTTP."""
    authority: bytes
    base_path: bytes
    replaced: tuple[tuple[bytes, bytes | None], ...]
    reported: tuple[Header, ...]
    timeouts: tuple[float, float, float]
    """In seconds: to connect, for a whole response, and between two parts of a body."""
    shows_hit: bool
    ordered_by: int
    """How its engine orders requests: an `OrderedBy`."""
    at_gateway: AtGateway
    name: str = ""
    """Its name of the model; empty: the client's."""


class ServedName(NamedTuple):
    """A name that requests may give; the core reads it by these names."""

    model: str
    in_mirror: int
    fleet: Any
    index: Any
    ways: list[Way]
    """The way to each replica of the fleet, in its order."""
    most_tokens: int
    """The longest prompt; longer ones are decided in Python."""
    adapter: str | None
    stream_first_byte_s: float
    is_read_first: bool
    """True if engines are sent something that only Python knows."""


class NativeDecisions(ReplicaListener):
    """Keeps the core's picture of the fleet true. Belongs to one event loop."""

    def __init__(
        self,
        parts: RouterParts,
        dispatcher: Dispatcher,
        planner: RoutePlanner,
        reserved: CoreReservations,
        shows_hits: bool,
    ) -> None:
        """
        Args:
            shows_hits: True if clients see how much of a prompt is cached.
        """
        self._shows_hits = shows_hits
        self._parts = parts
        self._dispatcher = dispatcher
        self._models = parts.models
        self._planner = planner
        self._addresses = parts.proxy.addresses
        self._placing = Placing(
            planner.decider,
            parts.config.events.self_repair_quiet_s,
            EngineOrder(parts.config.overload).facts,
            reserved,
        )
        parts.observers.repair.quiet.count_also(self._placing)
        self._published: Any = None
        self._is_on = self._has_failed = False
        self._has_changed = asyncio.Event()
        self._wanted: OrderedDict[str, None] = OrderedDict()
        """Adapters that requests have named, the latest at the end."""
        self._forms: dict[str, HintForm | None] = {}
        """The form of retention hints to replicas, by name."""
        self._seen: Any = None
        self._seen_at = -math.inf
        self._looking_s = 0.0
        """How long the last look took."""
        parts.registry.subscribe(self)
        parts.feed.on_change = parts.feed.taps.on_change = self._has_changed.set
        self._room = None if parts.entrance is None else parts.entrance.room
        if self._room is not None:
            self._room.on_turned = self._has_changed.set

    def want(self, adapter: str) -> None:
        """Have the core know an adapter, since a request has named it."""
        if adapter not in self._wanted:
            self._has_changed.set()
            if len(self._wanted) >= MAX_ADAPTERS:
                self._wanted.popitem(last=False)
        self._wanted[adapter] = None
        self._wanted.move_to_end(adapter)

    def hint_form(self, name: str) -> HintForm | None:
        """The form of retention hints to the replicas of a name; None where they get none."""
        return self._forms.get(name)

    def under_way(self) -> int:
        """Requests that the core has placed and that have not ended."""
        return self._placing.under_way()

    def allow(self, most: int) -> None:
        """Limit the core's requests under way from now on."""
        self._placing.allow(most)

    async def run(self, plane: DataPlane) -> None:
        """Keep it true until cancelled."""
        while True:
            if self._has_changed.is_set():
                self._seen = None
                self._has_changed.clear()
            self._refresh_safely(plane)
            with contextlib.suppress(asyncio.TimeoutError):
                async with timeout(self._pause_s()):
                    await self._has_changed.wait()

    @property
    def _is_quiet(self) -> bool:
        return self._is_on and not self._parts.admission.under_way

    def _pause_s(self) -> float:
        return _QUIET_S if self._is_quiet else REFRESH_S

    def _on_changed(self, *_: object, **__: object) -> None:
        self._has_changed.set()

    on_state_changed = on_models_changed = on_sources_changed = _on_changed
    on_reconfigured = on_removed = _on_changed

    def stop(self, plane: DataPlane) -> None:
        """Have everything decided in Python from now on."""
        plane.plane.decide_by(None)
        self._is_on = False

    def _refresh_safely(self, plane: DataPlane) -> None:
        """An old picture must not stay: after any error, Python decides until the core is
        updated."""
        try:
            self._refresh(plane)
        except Exception:
            if not self._has_failed:
                logger.exception("the data plane could not be updated; Python decides")
            self._has_failed, self._seen, self._published = True, None, None
            self.stop(plane)
        else:
            self._has_failed = False

    def _refresh(self, plane: DataPlane) -> None:
        admission, observers = self._parts.admission, self._parts.observers
        may = not (admission.is_full or observers.taps or admission.is_shutting_down)
        # While a request waits, new ones wait as well, even if there is room.
        may = may and (self._room is None or self._room.is_empty)
        if may and self._is_due():
            began = time.perf_counter()
            self._publish()
            self._looking_s = time.perf_counter() - began
        if may != self._is_on:
            self._is_on = may
            plane.plane.decide_by(self._placing if may else None)

    def _is_due(self) -> bool:
        """Return whether something may have changed that the core should know."""
        now = asyncio.get_running_loop().time()
        caches = [(model.name, model.index.slots, model.index.searches) for model in self._models]
        seen = caches, set(self._parts.feed.suspects)
        longest_s = _QUIET_LOOK_AGAIN_S if self._is_quiet else _LOOK_AGAIN_S
        longest_s = max(longest_s, self._looking_s / _LOOKING_SHARE)
        if seen == self._seen and now - self._seen_at < longest_s:
            return False
        self._seen, self._seen_at = seen, now
        return True

    def _publish(self) -> None:
        models: dict[str, ServedName] = {}
        forms: dict[str, HintForm | None] = {}
        published: list[Any] = []
        ways: dict[str, Way | None] = {}
        for name, model, adapter in self._names():
            found = self._served(name, model, adapter, ways)
            if found is None:
                continue
            served, fleet, forms[name] = found
            models[name] = served
            published.append((name, fleet, served))
        self._forms = forms
        if published == self._published:
            return
        self._published = published
        self._placing.serve(models)

    def _names(self) -> Iterator[tuple[str, Model, str | None]]:
        """Yield what requests may name, with the model and the adapter that it stands for."""
        versioned = self._models.versions.names()
        for model in self._models:
            yield from ((name, model, None) for name in model.names if name not in versioned)
        for name in list(self._wanted):
            try:
                model, adapter = self._models.resolve(name)
            except UnknownModel:
                del self._wanted[name]
                continue
            if adapter is not None:
                yield name, model, adapter

    def _served(
        self, name: str, model: Model, adapter: str | None, ways: dict[str, Way | None]
    ) -> tuple[ServedName, KnownFleet, HintForm | None] | None:
        """Return the core's entry for a name; None where Python has to look at its requests."""
        index, planner = model.index, self._planner
        serving = self._dispatcher.serving(model, adapter)
        replicas = list(serving.able.values())
        if not replicas or index.searches or serving.may_split:
            return None
        forms = {hint_form(model, replica) for replica in replicas}
        for replica in replicas:
            if replica.id not in ways:
                ways[replica.id] = self._way(replica)
        named = [
            way._replace(
                name=_name_at(replica, name, model),
                at_gateway=way.at_gateway._replace(block_tokens=_block_tokens(replica, index)),
            )
            for replica in replicas
            if (way := ways[replica.id]) is not None
        ]
        if len(forms) > 1 or len(named) < len(replicas):
            return None
        fleet = planner.fleets.fleet_of(model.name if adapter is None else name, replicas, index)
        longest = longest_certain(replicas, name) or MAX_PROMPT_TOKENS
        (form,) = forms
        served = ServedName(
            model.name,
            planner.number_of(model.name),
            fleet.core,
            index.shared,
            named,
            longest,
            adapter,
            self._parts.config.server.timeouts.first_byte_s,
            is_read_first=form is not None,
        )
        return served, fleet, form

    def _way(self, replica: Replica) -> Way | None:
        """The way to a replica; None where it is unknown yet, or may not be used."""
        origin, times = replica.origin, self._parts.config.server.timeouts
        hosts = origin.allowed(self._addresses.latest(origin.host))
        if not hosts:
            return None
        secure_host = origin.host if origin.tls else ""
        return Way(
            *(origin.key, tuple(hosts), origin.port, secure_host),
            *(origin.host_header, origin.target_prefix),
            replaced=tuple(replica.headers),
            reported=((b"x-kv-replica", replica.id.encode()),),
            timeouts=(times.connect_s, times.whole_response_s, times.idle_s),
            shows_hit=self._shows_hits,
            ordered_by=_ordered_by(replica),
            at_gateway=AtGateway(worker_number(replica.id), str(replica.origin), replica.address),
        )


def _block_tokens(replica: Replica, index: PrefixIndex) -> tuple[tuple[int, int], ...]:
    """Tokens of a block of each rank that has announced its layout."""
    found = []
    for source in replica.sources:
        layout = index.announced(SourceId(replica.id, source.dp_rank))
        if layout is not None and layout.hash_block_size:
            found.append((source.dp_rank, layout.hash_block_size))
    return tuple(found)


def _ordered_by(replica: Replica) -> OrderedBy:
    order = replica.priority_order
    if order is None:
        return OrderedBy.NOTHING
    if order == "higher_first":
        return OrderedBy.NEGATED_FIELD
    return OrderedBy.FIELD if replica.is_of("sglang") else OrderedBy.HEADER


def _name_at(replica: Replica, name: str, model: Model) -> str:
    """Return a replica's name of a model; empty where it is the client's."""
    if replica.serves(name):
        return ""
    return next((each for each in model.names if each in replica.served.models), "")


def prepared_with(config: RouterConfig) -> frozenset[bytes]:
    """The client's headers for which its request is read in Python before the core decides."""
    choosing = (each.header for each in config.versioned_models)
    names = (config.policy.session_header, *choosing)
    return frozenset((TRACEPARENT, *(name.encode() for name in names)))


def opened_with(config: RouterConfig) -> frozenset[bytes]:
    """The client's headers for which its request is decided in Python; names in lower case. All
    others go to the replica as they are, or the core drops or writes them as `Gateway` does."""
    return frozenset(
        (
            PRIORITY_HEADER,
            *headers_read(config.overload),
            *((RANK_HEADER,) if config.server.trust_client_rank else ()),
        )
    )
