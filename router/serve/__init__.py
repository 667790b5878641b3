"""Makes a router of its parts, and runs it in a process.

The roof: all other rooms are wired here, and nothing but `kvroute serve` and what embeds a router
stands on it.

The files; each imports only what is listed above it:

    settings.py   the options of each part, made from the configuration
    follower.py   what follows when replicas change
    service.py    makes, wires and closes all parts
    process.py    the start of the process: its event loop, its log, its sockets
    reload.py     takes over a changed configuration
    control.py    uvicorn behind the data plane, and the certificates that the plane shows
    seams/        what joins the data plane to Python
    server.py     the data plane, the application behind it made of every door, signals
"""
