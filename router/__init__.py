"""The router.

The compiled core, `core/`, is the module `_core`: `http/`, `tls/`, `plane/`, `decide/`, `mirror/`
and `index/`; only `binding/` knows Python. The files; each imports only what is listed above it:

    errors.py        exception tree; what clients get, with status and code
    prompt/          request body -> token ids, exact or marked as not
    index/           what caches hold and will evict: the group-aware prefix index, and the mirror
    policies/        hits and load -> ranked replicas; pure
    config/          the configuration: one frozen, checked model; files that are watched
    fleet/           which replicas exist, how they are, and what room they have
    plane/           the compiled data plane, which has the sockets, seen from Python
    feed/            carries every source's stream into the index of its model; snapshots
    routing/         request body -> decision; writes no metrics
    sharing/         what routers publish to each other
    telemetry/       metrics, the request log, traces, problems
    doors/           the APIs, and who may use them
    serve/           makes a router of these parts, and runs it in a process
    client.py        asks a router where to send, and reports; knows nothing of the others
    cli/             kvroute
"""
