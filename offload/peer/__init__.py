"""Pulls prefixes from the memory of other engines. A request may name another engine that holds a
prefix of its prompt in its tier in memory. Blocks that it reports are loaded from there as from a
tier of one's own, and missing ones are computed.

The files; each imports only what is listed above it:

    wire.py      the messages between engines
    names.py     addresses of peers that are named
    client.py    asks and fetches
    server.py    answers
    manager.py   the blocks that can be pulled for a request, as a tier
    worker.py    copies from peers to GPU blocks; imports torch
"""
