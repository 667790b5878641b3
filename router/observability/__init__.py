"""Metrics, the log of routed requests, and what is wrong with replicas.

The files; each imports only what is listed above it:

    request_log.py        the requests routed last, and their totals over the last minute
    metrics.py            metrics written as things happen; rendering all of them
    history.py            the last hour of the router and of each replica
    shortages.py          what the system refuses the router: files, ports, buffers, memory
    labels.py             words for kinds, shares, durations and tiers
    self_repair.py        which sources are predicted wrongly, and what is done about it
    problems.py           what is wrong with a replica, in sentences
    collector.py          metrics read at a scrape, from the parts' statistics
    readiness.py          is the router ready, and whom does it wait for?
    request_observer.py   one proxied request: load, health, metrics, log, prediction
"""
