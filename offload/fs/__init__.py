"""The tier on disk.

The files; each imports only what is listed above it:

    block_file.py   one block as a file: header, checksum, name
    store.py        reads, writes and removes files, from any thread; whose a directory is
    manager.py      what the tier holds, within a bound, across restarts
    worker.py       copies between GPU blocks and files; imports torch
"""
