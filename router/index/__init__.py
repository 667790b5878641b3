"""The index.

The files; each imports only what is listed above it:

    reference/   the index in plain Python, which defines the behaviour
"""
