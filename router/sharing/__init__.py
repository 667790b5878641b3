"""Lets routers know of each other's load: one small board, with one writer for each slot.

Every router publishes its own slot and reads the others': what it has in flight at each replica
and rank, which prefixes are being computed for it, and which replicas it found unhealthy. No
request waits for the board, and none needs it: without it each decides by what it knows itself.
Another board than Valkey needs one class, of `board.Board`.

The files; each imports only what is listed above it:

    slots.py      the content of a slot, and its bytes
    board.py      the interface of a board, and what synchronises a router with it
    valkey.py     the board: Valkey or Redis
    exchange.py   what becomes of what other routers publish
"""
