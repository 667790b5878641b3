"""The router's configuration: one frozen, validated model, built at the edge and passed down.

`RouterConfig.load` reads a file. `read_replica` reads one replica in the same form from a request,
and `ReplicaConfig.model_json_schema()` describes it.

The files; each imports only what is listed above it:

    origin.py         where a server is; timeouts
    section.py        the base of all mappings, how a broken rule is reported, and shared words
    extras.py         imports a part that needs an extra of the package
    values.py         the rules of single values
    document.py       has a watched file changed? YAML text -> plain data; pydantic's errors -> ours
    replica.py        one replica
    discovery.py      discovery of more of them
    server.py         addresses, certificates, keys and limits of the server; gateways, logs, traces
    certificates.py   our identity and trusted authorities, from files; kept fresh
    sharing.py        the state kept over a restart, and the board where routers publish their load
    models.py         models, what events leave out about their caches, and their versions
    routing.py        how it chooses, when prompts are computed elsewhere, and queues
    watch.py          how replicas and event streams are watched; estimates in place of these
    schema.py         the whole, and the rules between its sections
"""
