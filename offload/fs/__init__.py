"""The tier on disk.

The files; each imports only what is listed above it:

    block_file.py   one block as a file: header, checksum, name
    manifest.py     which layout and model a directory's blocks belong to
    store.py        reads, writes and removes files, from any thread
    manager.py      what the tier holds, within a bound, across restarts
    worker.py       copies between GPU blocks and files; imports torch
"""
