"""What becomes of requests when the replicas have no room for more. Pure but for one timer; knows
no HTTP and no replica.

The files; each imports only what is listed above it:

    limits.py        what the holder of a key may use
    gate.py          how much one replica may be given
    line.py          who waits for one model, and who is next
    room.py          the lines of all models, and their turns
    entrance.py      a request's key and headers -> its place in a line
    engine_order.py  the same order, as numbers for engines
"""

from router.overload.engine_order import EngineOrder
from router.overload.entrance import Entrance, line_limits
from router.overload.gate import (
    AT_LIMIT,
    AT_TOKEN_LIMIT,
    BACKING_OFF,
    BEING_PROBED,
    BREAKER_OPEN,
    PASSING,
    TENANT_BACKING_OFF,
    Breaker,
    GateOptions,
    ReplicaGate,
)
from router.overload.limits import KeyCounts, KeyLimits, KeyUsage
from router.overload.line import LineLimits, Waiter
from router.overload.room import NoTurn, RoomListener, Waiting, WaitingRoom

__all__ = [
    "AT_LIMIT",
    "AT_TOKEN_LIMIT",
    "BACKING_OFF",
    "BEING_PROBED",
    "BREAKER_OPEN",
    "PASSING",
    "TENANT_BACKING_OFF",
    "Breaker",
    "EngineOrder",
    "Entrance",
    "GateOptions",
    "KeyCounts",
    "KeyLimits",
    "KeyUsage",
    "LineLimits",
    "NoTurn",
    "ReplicaGate",
    "RoomListener",
    "Waiter",
    "Waiting",
    "WaitingRoom",
    "line_limits",
]
