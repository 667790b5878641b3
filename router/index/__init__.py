"""Predicts how much of a prompt each replica would reuse, and what its cache will evict next.

In come batches of events (`PrefixIndex.apply`) and prompts (`PrefixIndex.match`); out go hits, by
source. Both are compiled (`router/core/index`, `router/core/mirror`); `tests/oracle` has them in
readable Python, and defines their answers: a change of a rule begins there.

Events report what a cache holds, but not who used it last. The router knows: it sent the requests.
So the mirror keeps, for every cache, the requests in the order of their end with what each was the
last to use, which is the order in which an engine evicts (least recently used first).

The files; each imports only what is listed above it:

    compiled.py        whether the compiled core is there, and the right one
    base.py            the values that go into an index and come out of it
    hash_finder.py     which hash function an engine uses
    layout_learner.py  the cache layout: configured, and learned from events
    prompt.py          a prompt under every key and hash that some source may know it by
    sources.py         the state of one source outside the core; that of an index as records
    index.py           all sources of one model
    mirror_types.py    what goes into a mirror and comes out
    mirror.py          every cache: requests in prefill, ended ones, what is evicted next; estimates
"""
