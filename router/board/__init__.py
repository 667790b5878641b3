"""What routers tell each other: one small board, with one writer for each slot.

Every router publishes its own slot and reads the others': what it has in flight at each replica
and rank, which prefixes are being computed for it, and which replicas it found unhealthy. Nobody
waits for the board, and nobody needs it: without it each decides by what it knows itself.

The files; each imports only what is listed above it:

    slots.py      what a slot says, and its bytes
    base.py       the interface of a board, and what keeps a router and its board in step
    valkey.py     the board: Valkey or Redis
"""

from router.board.base import Board, BoardExchange, BoardStatistics
from router.board.slots import SharedLoad, SharedPrefix, Slot, SlotError

__all__ = [
    "Board",
    "BoardExchange",
    "BoardStatistics",
    "SharedLoad",
    "SharedPrefix",
    "Slot",
    "SlotError",
]
