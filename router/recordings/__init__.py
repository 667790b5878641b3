"""Recorded streams: format, capture, replay.

The files; each imports only what is listed above it:

    format.py    recorded streams: the format, reading, writing
    replay.py    a recording against the index
    capture.py   a live stream to a recording
"""
