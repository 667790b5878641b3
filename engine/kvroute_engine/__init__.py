"""A small real engine: a decoder-only transformer on the paged cache of `offload`, or the same
without tensors; and a demo that plays several behind the router.

The engine is what the end-to-end tests run against, and what people without a GPU test routers for
hybrid models with. A router treats it like vLLM.

Its rooms; each imports only what is listed above it:

    core/       scheduler, cache and time in steps; no tensors, no HTTP
    model/      the transformer, in torch; loaded only where a model is wanted
    http/       the engine on its own thread, behind vLLM's HTTP API
    command.py  `kvroute engine`
    demo/       `kvroute demo`: engines, a router, and the gain of its predictions
"""
