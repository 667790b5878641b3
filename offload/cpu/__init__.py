"""The tier in the CPU's memory.

The files; each imports only what is listed above it:

    policies/    which block is evicted next
    manager.py   what the tier holds and what is in flight
    worker.py    copies between GPU blocks and the tier's memory; imports torch
"""
