"""A small real engine: a decoder-only transformer on the paged cache of this package, or the same
without tensors.

It is what the end-to-end tests run against, and what people without a GPU test routers for hybrid
models with. A router treats it as it treats vLLM.
"""
