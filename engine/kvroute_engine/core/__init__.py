"""The engine itself, a step at a time: no tensors, no HTTP.

The files; each imports only what is listed above it:

    requests.py       the requests to an engine and its output, token by token
    batch.py          the tokens of one step
    model_config.py   the layers of a model, in KV cache groups
    presets.py        models by name
    sequence.py       one request from its arrival to its end
    serving_order.py  the order of sequences, by policy
    scheduler.py      which tokens of which sequences a step computes
    time_model.py     how long a step would take; clocks
    simulated.py      runner, transfer workers and files without tensors
    engine.py         scheduler, runner, tiers and publisher, put together in steps
    build.py          from a configuration to a running engine
"""
