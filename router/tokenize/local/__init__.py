"""Text -> token ids in the router.

The files; each imports only what is listed above it:

    backend.py           a tokenizer set up as the engine's; its special tokens
    segments.py          whether and where a text may be cut, every rule with its reason
    cache.py             token ids by segment
    tokenizer.py         tokenisation in the router
"""
