"""Follows changing lists of replicas, and makes the registry match them.

A provider reports the complete list of its replicas whenever it changes; a list that it cannot get
it reports as a failure, and the last one stays.

The files; each imports only what is listed above it:

    provider.py        the interfaces of a provider and its listener; delays after failures
    file.py            a file that is watched
    dns.py             A, AAAA and SRV records
    kubernetes_api.py  a collection of objects, kept true by a list and watches
    kubernetes.py      pods, endpoints of a service, an InferencePool
    keeper.py          adds, drains and removes replicas as the providers report
"""
