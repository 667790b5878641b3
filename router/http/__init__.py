"""Every line that knows asgi, fastapi or uvicorn.

The files; each imports only what is listed above it:

    uvicorn_protocol.py   uvicorn's protocol with an abort, and joined writes
    connection_guard.py   bounds on what a client's connection may cost
    gateway.py            the proxied paths: admit, read, decide, stream
    views.py              decisions, replicas, requests and models as plain data
    overview.py           the router at a glance, as plain data
    live_page.py          the live page: its files, and what binds a browser to them
    api.py                the router's own endpoints, on FastAPI
"""
