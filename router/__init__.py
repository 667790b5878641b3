"""The router.

The files; each imports only what is listed above it. The compiled core, `core/`, is the module
`_core`; its rooms are `index/`, `mirror/`, `decide/`, `http/` and `plane/`, and only `binding/`
knows Python:

    errors.py        exception tree; what clients get, with status and code
    files.py         whether a watched file has changed
    upstream/        a small pooled HTTP/1.1 client
    board/           what routers tell each other
    index/           the group-aware prefix index
    scoring/         hits and load -> ranked replicas; pure
    config/          the configuration: one frozen, checked model
    tls.py           certificates, read again when they are renewed
    tokenize/        request body -> token ids, exact or marked as not
    overload/        who waits for room at a replica, and who is next
    mirror/          what every cache is doing and will evict next
    steering/        what an engine should keep of a request; pure
    replicas/        which replicas exist, and how they are doing
    discovery/       which replicas there should be: files, DNS, Kubernetes
    taps.py          records what happens at one cache, while someone listens
    feed.py          carries every source's stream into the index of its model
    snapshots/       what a router knows of caches when it starts
    proxy/           where a request may be tried, and what is reported of it
    plane/           the compiled data plane, which has the sockets, seen from Python
    routing/         request body -> decision; writes no metrics
    observability/   metrics, the request log, what is wrong
    doors/           how gateways that send requests themselves ask and report
    tracing/         to which trace a request belongs, and its spans
    sharing.py       what becomes of what other routers tell
    service.py       all parts wired; what follows when replicas change
    process.py       what every process does: its log, its sockets
    http/            every line that knows ASGI, FastAPI or uvicorn
    preparing.py     which token ids requests of the data plane ask for
    placing.py       what the data plane may decide without Python
    settling.py      what becomes of the requests that it decided
    picking.py       the endpoint picker's gRPC server, wired; only where it listens
    reload.py        takes over a changed configuration
    app.py           the ASGI application
    serve.py         the data plane, the application behind it, signals
    recordings.py    recorded streams: the format, and how well the index predicts one
    demo/            small engines behind a real router, and what it gains
    client.py        asks a router where to send, and reports; knows nothing of the others
    cli/             kvroute
"""
