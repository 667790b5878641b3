"""`kvroute demo`: small engines behind a real router, and the gain of its predictions.

The files; each imports only what is listed above it:

    workload.py       the prompts of the demo
    blind.py          indexes that know no groups
    processes.py      engines and a router as processes
    client.py         an HTTP client; a streamed completion, timed
    phase.py          one part of a play, and its results
    comparison.py     the ways of routing beside each other, and the part of chance
    fleet.py          caches of the engines, states of their streams
    play.py           the demo from start to end
    command.py        the command, its tables and its words
"""
