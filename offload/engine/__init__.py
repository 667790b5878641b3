"""A small real engine: a decoder-only transformer on the paged cache of this package, or the same
without tensors.

It is what the end-to-end tests run against, and what people without a GPU test routers for hybrid
models with. A router treats it as it treats vLLM.

The files; each imports only what is listed above it:

    requests.py          what it is asked and what it answers
    batch.py             what one step computes
    model_config.py      what a model is made of; its layers in groups
    presets.py           models by name
    scheduler.py         which tokens of which sequences a step computes
    time_model.py        how long a step would take; clocks
    simulated.py         its hands without tensors
    engine.py            scheduler, model, tiers and publisher in steps
    build.py             from a configuration to an engine
    kv_pages.py          pages as keys and values, states, bytes
    model.py             the transformer, in torch
    torch_runner.py      computes batches with it
    torch_hands.py       the only way from the engine to torch
    errors.py            exception tree
    chat.py              a conversation and the text of its messages
    tokenizer.py         text <-> token ids; bytes as tokens
    chat_template.py     a model's chat template in its sandbox
    tokenizer_files.py   any model's tokenizer.json
    text_stream.py       the text of an answer while it grows
    faults.py            hang, slow, crash on demand
    schemas.py           bodies of requests, checked
    service.py           the engine on a thread, for an event loop
    answers.py           OpenAI's shapes, as plain data
    completion.py        one answer while it grows
    clients.py           a client's side of a request
    event_stream.py      an answer as server-sent events
    http_errors.py       errors as clients are told them
    http_metrics.py      metrics under vLLM's names
    http_api.py          the engine over HTTP, as vLLM speaks it
    server.py            uvicorn, signals
    command.py           `kvroute engine`
"""
