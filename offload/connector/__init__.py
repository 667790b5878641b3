"""The scheduler's side of offloading: plans loads and stores, and follows their copies.

The files; each imports only what is listed above it:

    block_aliases.py   the hashes under which a tier's blocks can be found
    tier.py            one lower tier as the connector sees it; its events
    load_plan.py       what the tiers add to a hit on the GPU, and the copies that bring it
    store_plan.py      which blocks of a request are worth storing
    connector.py       `OffloadingConnector`: loads and stores, from plan to completion
"""
