"""The parts of `benchmarks.soak`: a fleet of real processes, what goes wrong with it, and clients
that check every response.

The files; each imports only what is listed above it:

    links.py    TCP that can be cut or held up, and a balancer on top of it
    clients.py  requests at random times; whether each response is the right one
    fleet.py    engines, routers, and the server of their board
    faults.py   what is done to them, and which failures that excuses
    quiet.py    is every cache known exactly, now that nothing happens?
"""
