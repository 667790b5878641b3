"""The index in plain Python: dictionaries, no cleverness. It defines the behaviour, and whatever is
faster is tested to equal it.

The files; each imports only what is listed above it:

    keys.py             the router's own keys for prefixes
    extra_keys.py       what besides tokens decides a block: for our keys, and as engines hash it
    block_table.py      copies of each block by group and tier; which prefix a hash stands for
    copy_counting.py    which removals of a block's copies a source announces
    placing.py          runs of blocks with tokens: their keys, now or once the parent's is known
    layout_learner.py   what events say about the cache layout and about what a tier keeps together
    shared_store.py     blocks that several sources can load, whoever stored them
    hash_finder.py      which hash function an engine uses
    source.py           one source: what a batch of events does to all of the above
    export.py           the state as records and back
    index.py            all sources of one model, and the hit of a prompt at each
"""
