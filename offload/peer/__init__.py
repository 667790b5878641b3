"""Prefixes pulled from the memory of other engines.

A request may name another engine that holds a prefix of its prompt in its tier in memory. What that
engine reports as held is loaded from there as from a tier of one's own, and what it no longer has
is computed.

The files; each imports only what is listed above it:

    wire.py      what one engine asks another
    client.py    asks and fetches
    server.py    answers
    manager.py   what can be pulled for a request, as a tier
    worker.py    copies from peers to GPU blocks; imports torch
"""
