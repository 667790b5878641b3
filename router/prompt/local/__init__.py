"""Text -> token ids in the router.

The files; each imports only what is listed above it:

    backend.py           has the tokenizers library tokenise; the special tokens around a prompt
    segmenter.py         cuts texts in front of anchors
    segments.py          whether and where a text may be cut, every rule with its reason
    message_ends.py      where the messages of a chat end, in tokens
    cache.py             the tokenizers library behind a cache, by segment
    native.py            fastokens, for the tokenizers that it is known to get right
    tokenizer.py         tokenisation in the router
"""
