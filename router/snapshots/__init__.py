"""What a router knows of caches when it starts: a snapshot of the index, from a worker beside it,
from another router, or from disk.

A source is saved with the place of its stream, as of one moment, and only while nothing of it is
missing. The router that starts asks the engine for the batch that was applied last and for what
came since: if it is the same process, the source is whole again after a few batches, and otherwise
it is rebuilt as it would have been anyhow. So an old snapshot costs time at worst, and no truth.

It holds block hashes, and tokens of runs that wait for their parents: treat it like a log of
prompts.

The files; each imports only what is listed above it:

    records.py     a snapshot as bytes, and back into an index
    file.py        on disk
    transfer.py    between processes: bounded, and sealed
    peers.py       from other routers, over HTTP
    beginning.py   at a start: the first place that has one
"""

from router.snapshots.beginning import Beginning
from router.snapshots.file import FILE_NAME, SnapshotKeeper, read_file
from router.snapshots.peers import PeerLimits, Peers, peer_key
from router.snapshots.records import IndexSnapshot, SnapshotError, read, restore
from router.snapshots.transfer import Sender, read_sealed

__all__ = [
    "FILE_NAME",
    "Beginning",
    "IndexSnapshot",
    "PeerLimits",
    "Peers",
    "Sender",
    "SnapshotError",
    "SnapshotKeeper",
    "peer_key",
    "read",
    "read_file",
    "read_sealed",
    "restore",
]
