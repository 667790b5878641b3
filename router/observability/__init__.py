"""Metrics, the request log, what is wrong.

The files; each imports only what is listed above it:

    rolling_totals.py     the last minute in numbers
    request_log.py        the requests routed last: predicted, actual, why
    metrics.py            metrics written as things happen; rendering all of them
    problems.py           what is wrong with a replica, in sentences
    collector.py          metrics read at a scrape, from the parts' statistics
    request_observer.py   one proxied request on the books
"""
