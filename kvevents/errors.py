"""What can go wrong with KV cache events.

    KVEventsError
    ├── MalformedBatch        a payload that is no event batch (place, value, rule)
    ├── MalformedReply        a replay or snapshot reply that breaks the protocol
    ├── LayoutError           a cache layout that contradicts itself
    ├── HashAlgorithmError    an unknown hash algorithm, or one whose library is missing
    ├── EndpointError         an address no socket can bind or connect to
    ├── NoConnection          nobody to talk to at an endpoint, for now
    ├── NoAnswer              a replay endpoint that fell silent, hung up or would not end
    ├── PlugInError           an unknown name, or a plug-in that cannot be used
    └── PublisherClosed       publish() after shutdown()

Messages name place, value and rule, and never carry token ids: those are prompts.
"""

from __future__ import annotations


class KVEventsError(Exception):
    """Root of everything this package raises on purpose."""


class MalformedBatch(KVEventsError):
    """A payload that cannot be read as an event batch; treat it as a gap."""


class MalformedReply(KVEventsError):
    """A replay or snapshot reply that breaks the protocol."""


class LayoutError(KVEventsError):
    """A cache layout that contradicts itself."""


class HashAlgorithmError(KVEventsError):
    """An unknown hash algorithm, or one whose library is not installed."""


class EndpointError(KVEventsError):
    """An address no socket can bind or connect to."""


class NoConnection(KVEventsError):
    """Nobody to talk to at an endpoint, for now."""


class NoAnswer(KVEventsError):
    """The replay endpoint fell silent, hung up or would not end."""


class PlugInError(KVEventsError, ValueError):
    """An unknown name, or a plug-in that cannot be used."""


class PublisherClosed(KVEventsError):
    """The publisher was shut down; the batch was not taken."""
