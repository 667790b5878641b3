"""Keeps the index up to date with every event stream, and gives a new router a snapshot to start
from.

In come batches of events, each of a source; out go changes of the index, and a state of each
stream. A snapshot of the index, from another router or from disk, is only a beginning: a source is
saved with the place of its stream, as of one moment, and only while nothing of it is missing. The
router that starts asks the engine for the batch that was applied last and for what came since: if
it is the same process, the source is whole again after a few batches, and otherwise it is rebuilt
as it would have been anyhow. So an old snapshot costs time at worst, never correctness. It holds
block hashes, and tokens of runs that wait for their parents: treat it like a log of prompts.

The files; each imports only what is listed above it:

    taps.py              recorders of a cache; keeps nothing without a listener
    polled.py            events that are polled over HTTP, as connections
    source_feed.py       applies the batches of one stream to the index of its model
    feed.py              all streams: follows them, and knows which of them are whole
    snapshot_records.py  a snapshot as bytes, and back into an index
    snapshot_file.py     on disk; at a start, from the first place that has one
    snapshot_peers.py    between routers, over HTTP: bounded, and sealed
"""
