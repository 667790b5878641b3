"""The disk tier: what it holds and evicts (`manager`), its files (`store`, `block_file`), the
copies to and from the GPU.

The files; each imports only what is listed above it:

    manifest.py     which blocks a directory is for
    block_file.py   one block's file: header, checksum, name
    store.py        reads, writes and removes files, from any thread
    worker.py       copies to and from its files
    manager.py      what the tier holds, bounded, across restarts
"""
