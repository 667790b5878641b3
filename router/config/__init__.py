"""The router's configuration: one frozen, validated model, built at the edge and passed down.

`RouterConfig.load` reads a file. `read_replica` reads one replica in the same form from a request,
and `ReplicaConfig.model_json_schema()` describes it.

The files; each imports only what is listed above it:

    files.py          has a watched file changed?
    extras.py         imports a part that needs an extra of the package
    origin.py         where a server is; timeouts
    rules.py          how a broken rule is reported, and words that other rooms share
    values.py         the rules of single values
    document.py       YAML text -> plain data; pydantic's errors -> ours
    section.py        the base of all mappings
    replica.py        one replica
    discovery.py      discovery of more of them
    tls.py            certificates
    certificates.py   our identity and trusted authorities, from these files; kept fresh
    state.py          the state kept over a restart
    board.py          where routers publish their load to each other
    keys.py           keys and their options
    overload.py       queues for replicas without room
    doors.py          limits of gateways that send requests themselves
    observability.py  logs, metrics, traces
    approximate.py    estimates in place of missing event streams
    versions.py       names that stand for several versions of a model
    models.py         models, and what events leave out about their caches
    server.py         addresses, keys and limits of the server
    policy.py         how it chooses
    prefill.py        when prompts are computed elsewhere
    health.py         how replicas are watched
    events.py         how event streams are followed
    schema.py         the whole, and the rules between its sections
"""
