"""The command line: one file a command.

The files; each imports only what is listed above it:

    signals.py            runs a command until done or until a signal
    running_router.py     queries to a router over HTTP; text made safe for a terminal
    recordings.py         does the index predict a recorded stream?
    serve_command.py      run the router
    route_command.py      ask a running router where a prompt would go
    top_command.py        watch a running router
    capture_command.py    record a live event stream
    replay_command.py     compare recordings with the index's predictions
    keys_command.py       make keys for encrypted event streams
    main.py               the entry point; imports only the command that is to run
"""
