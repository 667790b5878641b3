"""The command line: one file a command.

The files; each imports only what is listed above it:

    signals.py            an end on demand, with everything cleaned up
    running_router.py     one that runs somewhere, asked over HTTP
    top_answers.py        what is read of its answers
    top_view.py           it at a glance, in a terminal
    serve_command.py      run the router
    route_command.py      ask a running one
    top_command.py        look at a running one
    capture_command.py    record a stream
    replay_command.py     check recordings
    demo_command.py       the demo's tables
    plugged_commands.py   commands of other packages
    main.py               the entry point
"""
