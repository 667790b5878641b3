"""The index in plain python, which defines the behaviour.

The files; each imports only what is listed above it:

    keys.py       the router's own names for prefixes; what besides tokens decides a block
    waiting.py    runs whose parent is not known yet; bounds of a source
    learning.py   what events say of layout and hash function; what has to be assumed
    source.py     what one source holds, block by block
    match.py      one prompt against one source: the hit, and each group's part in it
    index.py      all sources of one model: apply, match, explain
    dump.py       an index as bytes and back
"""
