"""Every line that knows ASGI, FastAPI or uvicorn.

The files; each imports only what is listed above it:

    access_log.py         one line for each request
    networks.py           networks of addresses
    access.py             authorises requests: keys, peers, names, origins
    bodies.py             reads the bodies of requests, and one field of a form; JSON as a response
    forwarding.py         the part of a client's request that goes on to a replica
    gateway.py            the proxied paths: admit, read, decide, pass on
    views.py              bodies of responses as types: probes, errors, models
    route_views.py        where a request goes, and why: the types
    request_views.py      the requests routed last
    replica_views.py      replicas in full
    overview.py           the router at a glance
    view_examples.py      examples of them
    request_bodies.py     the bodies of requests, as types with examples for the OpenAPI document
    question_fields.py    what gateways say beside the request that they ask about
    openapi.py            the OpenAPI document
    models.py             the models that clients may ask for
    decision_views.py     the responses that show a decision
    live_page.py          the live page's files, and the headers that restrict a browser to them
    questions.py          `/route` in short, without ASGI
    selection.py          where gateways that send requests themselves ask and report
    dialects.py           the paths of other indexers
    error_handlers.py     errors as responses
    api.py                the router's own endpoints, on FastAPI, and the parts they read and change
"""
