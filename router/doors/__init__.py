"""The router's APIs and who may use them: our HTTP API (`http/`), gateways that send requests
themselves, Envoy's external processing, the dialects of other indexers.

In come questions; out go decisions and bookings, in the asker's form. A dialect is added in
`http/dialects.py`. Only `http/` knows ASGI, only `external_processing.py` gRPC.

The files; each imports only what is listed above it:

    names.py                what gateways call a replica
    proxied_paths.py        the paths that go to a replica, and how it is chosen
    asks.py                 keys with their rights; a question and its purpose
    terms_reader.py         what a key and headers say of a request
    reservations.py         bookings, until their gateways report the end or fall silent
    adopted.py              those that the compiled core makes by itself
    desk.py                 decides, waits for room, books
    messages.py             of Envoy's external processing, gRPC's health checks, llm-d's indexer
    picker.py               one request of a gateway that asks by external processing
    http/                   everything that knows ASGI or FastAPI
    external_processing.py  how Envoy's questions arrive; imported only where it listens
"""
