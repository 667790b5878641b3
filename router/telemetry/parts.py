"""The parts of one router, as telemetry and the doors see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.config.schema import RouterConfig
from router.feed.feed import Feed
from router.feed.snapshot_file import SnapshotKeeper
from router.feed.snapshot_peers import Peers, Sender
from router.fleet.discovery.keeper import ReplicaKeeper
from router.fleet.entrance import Entrance
from router.fleet.limits import KeyLimits
from router.fleet.registry import ReplicaRegistry
from router.index.mirror import ApproximateCaches, Mirror
from router.plane.relays import PlaneProxy
from router.routing.admission import Admission
from router.routing.deciding import Deciding
from router.routing.models import ModelSet
from router.routing.recent_prefixes import RecentPrefixes
from router.routing.replica_tokenizers import TokenizerCheck
from router.routing.stored_responses import StoredResponses
from router.sharing.board import Board
from router.sharing.exchange import Sharing
from router.telemetry.history import History
from router.telemetry.metrics import RouterMetrics
from router.telemetry.readiness import Readiness
from router.telemetry.request_log import RequestLog
from router.telemetry.request_observer import RequestObservers
from router.telemetry.self_repair import SelfRepair
from router.telemetry.shortages import Shortages
from router.telemetry.spans import Tracer


class RouterParts:
    """Holds the parts of a router. `RouterService` makes, starts and stops all of it; where a part
    is None, the configuration does not ask for it."""

    config: RouterConfig
    """The configuration last taken over."""

    # Requests.
    admission: Admission
    dispatcher: Deciding
    models: ModelSet
    key_limits: KeyLimits
    entrance: Entrance | None
    """The queue for room at replicas."""
    responses: StoredResponses
    recent: RecentPrefixes
    proxy: PlaneProxy
    observers: RequestObservers
    tracer: Tracer | None
    """Begins the trace of each request."""

    # Replicas and their caches.
    registry: ReplicaRegistry
    keeper: ReplicaKeeper
    tokenizer_check: TokenizerCheck
    feed: Feed
    mirror: Mirror
    approximate: ApproximateCaches | None
    count_connections: Callable[[], Mapping[str, int]]
    """Returns the data plane's connections to replicas, by the names of `Plane.counts`."""

    # Other routers, and starts.
    board: Board | None
    sharing: Sharing | None
    snapshots: SnapshotKeeper | None
    peers: Peers | None
    """Other routers, asked for a snapshot at the start."""
    sender: Sender | None
    """Sends snapshots to them."""

    # What happened, and what is wrong.
    metrics: RouterMetrics
    request_log: RequestLog
    history: History
    readiness: Readiness
    repair: SelfRepair
    shortages: Shortages
