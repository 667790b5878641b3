"""The compiled data plane, seen from Python: what it asks, and the commands it takes.

Its threads own the sockets of clients and of replicas. They ask here what they cannot decide, and
report what happens to a request:

    core thread ──Opened──> DataPlane ──> Passage ──> PlaneProxy
         ^                                                │
         └────────── Forward, Respond, PassOn ────────────┘
    core thread ──Prepare──> `serve.seams.prepare`, which answers `place` or `open`
    core thread ──FirstByte, Progress, Ended──> PlaneRelay ──> the request's observer

The files:

    attempts.py          where a request may be sent, how that fails, how often it is tried again
    exchanges.py         a client's request that the core holds
    proxy_types.py       a request to a replica, and the reports on it
    proxied_messages.py  errors of the router's own, and the end of a broken event stream
    usage.py             the token counts and the id in a passing response
    addresses.py         where the hosts of replicas are
    secured.py           the router's TLS identity and trusted authorities, in the core
    relays.py            a request that was sent on: its attempts, and their events from the core
    data_plane.py        the core's threads, and the handlers of their events

Requests that go to no replica (pages, probes, scrapes, operators) are passed on to the application
behind the plane, which listens on a socket of its own.
"""
