"""The engine over HTTP, as vLLM serves one.

The files; each imports only what is listed above it:

    errors.py           exception tree
    chat.py             a conversation and the text of its messages
    tokenizer.py        text <-> token ids; a tokenizer whose tokens are bytes
    chat_template.py    a model's chat template, rendered in a sandbox
    tokenizer_files.py  any model's `tokenizer.json`
    text_stream.py      the text of a response while it grows; stop strings
    faults.py           hang, slow, crash and restart on demand
    schemas.py          request bodies, checked
    engine_thread.py    the engine on its own thread
    service.py          requests to it, for an event loop
    responses.py        response bodies in OpenAI's shapes, as types
    completion.py       one response while it grows
    clients.py          a client's body, and whether the client is still there
    sse.py              a response as server-sent events
    error_handlers.py   errors as HTTP responses
    metrics.py          metrics under vLLM's names
    api.py              the endpoints
    server.py           uvicorn and signals
"""
