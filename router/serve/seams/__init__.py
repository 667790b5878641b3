"""Joins the compiled data plane to Python: three seams, a file each, and nothing else.

The data plane knows replicas, limits, keys and models as `fleet.py` sets them, asks `prepare.py`
for token ids of text, and reports to `records.py` what became of each request that it served. A
newcomer who adds a fact that a decision needs begins with `fleet.py`.

    fleet.py     Python -> core: who there is, and what the core may decide without Python
    prepare.py   core -> Python: which token ids does a request ask for?
    records.py   core -> Python: what became of a request that the core served by itself?
"""
