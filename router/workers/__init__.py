"""Several processes that are one router: `kvroute serve --workers N`.

A supervisor starts them, starts those again that end, and passes on what one asks of all others. It
routes nothing itself: each worker listens on the same port (SO_REUSEPORT), and has its own event
streams and index. What they know of each other's requests goes over `router.board`.

Every worker has a line to the supervisor, a socket that it inherits. When it breaks, the other end
is gone: a worker without supervisor finishes its requests and ends.

The files; each imports only what is listed above it:

    line.py         messages between a supervisor and a worker
    member.py       a worker's side: its start, what it asks of the others, what they ask of it
    fleet.py        replicas added, drained and removed by hand, at every worker
    exposition.py   the metrics of all workers as one text
    supervisor.py   starts workers, and passes on
"""
