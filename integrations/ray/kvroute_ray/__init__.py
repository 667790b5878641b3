"""Ray Serve asks a router which replica of a deployment gets a request.

    names            what a replica of Ray is called at the router
    options          what a deployment configures; checked where the application is built
    questions        what the router is asked about a call; pure
    outcomes         how calls are placed, or refused
    request_router   what Ray asks: the replica, booked until the call is over
    health           what answers for a replica whose engine serves no HTTP
    registration     a replica has itself listed at the router, as long as it lives
    reports          a replica reports the first token, progress, and what was cached

Only `request_router` and what it needs runs in the processes that hold handles; `registration` and
`reports` run in replicas. Without a router everything goes on, by Ray's own choice.
"""
