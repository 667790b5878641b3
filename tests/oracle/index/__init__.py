"""The index in plain Python: dictionaries, no cleverness. It defines the behaviour of the compiled
one, which is tested to equal it.

The files; each imports only what is listed above it:

    keys.py             the router's own keys for prefixes
    marks.py            what besides tokens decides a block, as our keys take it
    block_table.py      copies of each block by group and tier; which prefix a hash stands for
    copy_counting.py    which removals of a block's copies a source announces
    placing.py          runs of blocks with tokens: their keys, now or once the parent's is known
    tier_units.py       what a tier keeps together
    shared_store.py     blocks that several sources can load, whoever stored them
    source.py           one source: what a batch of events does to all of the above
    export.py           the state as records and back
    index.py            all sources of one model, and the hit of a prompt at each
"""
