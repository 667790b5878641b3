"""The mirror in plain Python. It defines what the compiled one says, which is tested to equal it;
`router.index` says what each of its methods is for.

The files; each imports only what is listed above it:

    ownership.py   which of several requests used each part of a prefix last
    prefix_tree.py how much of a prompt others share
    layout.py      where hits can end, and how many blocks prompts take
    in_prefill.py  prompts that are being computed, and how much of them a new one shares
    eviction.py    what is evicted next, and how much prompts evict
    traffic.py     rates, and how probable it is that what is idle will be used again
    loading.py     what it costs to load from below the GPU
    mirror.py      every cache: requests in prefill, ended ones in order, what is evicted next
    approximate.py what a cache holds whose events are not there
"""
