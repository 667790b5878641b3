"""The CPU tier: what it holds and evicts (`manager`, `policies`), and the copies to and from the
GPU.

The files; each imports only what is listed above it:

    policies/    who goes first
    manager.py   what the tier holds and what is in flight
    worker.py    copies to and from its memory
"""
