"""KV cache events.

The files; each imports only what is listed above it:

    errors.py             exception tree
    plugins.py            implementations by name: built-in, registered, from entry points
    events.py             BlockStored, BlockRemoved, AllBlocksCleared, CacheLayout, batches, the
                          aggregator of workers
    layout.py             groups and the hit rule: how much of a prompt such a cache can serve
    hashing.py            token ids -> chain of block hashes, as vLLM computes them
    codec.py              bytes <-> batches: native, vLLM of every age, SGLang
    sequence.py           what a sequence number means
    messages.py           what the frames of a ZMQ message mean
    endpoints.py          addresses: checked, moved along by rank, opened
    publisher_config.py   what a publisher can be told
    replay_ring.py        the last batches of a stream
    snapshot.py           the present state of a cache, told again as events
    replies.py            the replay endpoint: who asked for what, how much of it is sent
    stream.py             one numbered stream on its own thread
    publisher.py          the engine's side: publishers, and which one a configuration asks for
    pacing.py             how subscribers share the event loop; backoff
    sockets.py            one connection of one ZMQ socket on an event loop
    delivery.py           every batch once and in order; the states of a source
    live.py               the live side of a connection, also during a recovery
    replay.py             asking a replay endpoint, every answer bounded
    recovery.py           making a picture whole again
    subscriber.py         the router's side: follows one publisher
"""
