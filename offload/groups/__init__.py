"""Implements the needs of each kind of attention from the KV cache.

The files; each imports only what is listed above it:

    base.py              block tables of one group: full attention, and a base for other kinds
    local.py             sliding windows, chunked local attention
    mamba.py             Mamba and linear attention
    cross_attention.py   cross attention
"""
