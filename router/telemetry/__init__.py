"""Records requests and faults: metrics, request logs, traces, the last hour, problems.

In come the events of each request (`request_observer.py`) and the parts' statistics; out go the
responses of `/metrics`, `/requests` and `/overview`, spans, and sentences about replicas. A metric
is added at the field of the statistics that it shows (`kvevents.field_docs`), in `metrics.py` where
it counts what happens, and in `collector.py` where it is made of several parts; a problem in
`problems.py`.

The files; each imports only what is listed above it:

    settled.py            requests that the data plane decided by itself; and sums of them
    request_log.py        the requests routed last, and their totals over the last minute
    metrics.py            metrics written as things happen; rendering all of them
    history.py            the last hour of the router and of each replica
    shortages.py          resources that the system refuses: files, ports, buffers, memory
    labels.py             words for kinds, shares, durations and tiers
    self_repair.py        sources that are predicted wrongly, and their rebuilds
    problems.py           problems of a replica, in sentences
    observed_prefill.py   a prompt that a replica computes for another one
    readiness.py          is the router ready, and what does it wait for?
    trace_context.py      W3C Trace Context of a client's request and of one to a replica
    spans.py              what one request does and when; handed over at its end
    request_observer.py   one proxied request: load, health, metrics, log, prediction
    parts.py              the parts of a router
    collector.py          metrics read at a scrape, from the parts' statistics
    otel.py               spans made of that and sent, in a thread; needs the extra `otel`
"""
