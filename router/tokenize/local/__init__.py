"""Text -> token ids in the router.

The files; each imports only what is listed above it:

    backend.py           a tokenizer set up as the engine's; its special tokens
    segments.py          where a text may be cut, every rule with its reason
    segmenter_check.py   whether a tokenizer's texts are cut: by rule, then by trying
    cache.py             token ids by segment
    tokenizer.py         tokenisation in the router
"""
