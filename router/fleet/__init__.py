"""Tracks the replicas: which exist, their health, their load and their room.

In come the lists of providers, the answers of replicas, and the outcomes of requests; out go
`ReplicaRegistry`'s views and its calls to listeners, and a place in a line for each request that
has to wait. A newcomer may add a provider (`discovery/`), an engine's metric (`engine_load.py`), or
a reason to call a replica unhealthy (`health.py`).

The files; each imports only what is listed above it:

    client_errors.py     the errors of a request to a server
    client.py            asks servers about themselves, with bounds and time limits
    probes.py            the same for periodic probes, at less cost
    gate.py              whether one replica may get another request
    line.py              the requests that wait for one model, and which is next
    room.py              the lines of all models, and their turns
    entrance.py          a request's key and headers -> its place in a line and in an engine
    load.py              this router's load, by replica
    engine_load.py       an engine's load, by its own metrics
    load_topic.py        the load that an engine publishes
    types.py             plain values
    limits.py            the limits of a key's holder
    health.py            outcomes of checks and requests in, healthy or not out
    quiet_moments.py     which requests had a replica to themselves
    self_description.py  a replica's reports about itself
    replica.py           one replica's state
    pace.py              how often replicas are asked about themselves
    watchers.py          all replicas, at one pace; two tasks each: health; models, streams and load
    registry.py          all replicas; reports changes to listeners
    discovery/           where replicas come from: lists that change
"""
