"""`kvroute demo`: small engines behind a real router, and what its predictions gain.

The files; each imports only what is listed above it:

    workload.py       what the demo's clients say
    blind.py          an index that knows no groups
    blind_router.py   a router with it, as a process
    processes.py      engines and a router, started and ended
    client.py         a streamed completion, timed
    phase.py          one run of the workload, counted
    fleet.py          what engines say of their caches
    play.py           the play
"""
