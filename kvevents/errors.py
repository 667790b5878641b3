"""The exceptions of this package.

Messages name place, value and rule, and never contain token ids: those are prompts.
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""Raised by msgspec for bytes that it cannot read: its errors, and Python's for values that are
nested too deep and for text that is not UTF-8."""


class KVEventsError(Exception):
    """Base class of everything that this package raises on purpose."""


class MalformedBatch(KVEventsError):
    """A payload that cannot be read as an event batch; treat it as a gap."""


class MalformedReply(KVEventsError):
    """A replay or snapshot reply that breaks the protocol."""


class LayoutError(KVEventsError):
    """A cache layout that contradicts itself."""


class HashAlgorithmError(KVEventsError):
    """An unknown hash algorithm, or one whose library is not installed."""


class CurveError(KVEventsError):
    """A file of keys that cannot be used, or a libzmq without CURVE."""


class HashKeyError(KVEventsError):
    """A file that holds no hash key, or cannot be read or written."""


class EndpointError(KVEventsError):
    """An address that no socket can bind or connect to."""


class NoConnection(KVEventsError):
    """No peer at an endpoint, for now."""


class ForeignAddress(NoConnection):
    """No address of the host may be connected to."""


class HandshakeFailed(NoConnection):
    """The peer speaks another protocol, or has not the keys that it should."""


class NoAnswer(KVEventsError):
    """A replay endpoint that stays silent, hangs up or does not end its reply."""


class PlugInError(KVEventsError, ValueError):
    """An unknown name, or a plug-in that cannot be used."""


class PublisherClosed(KVEventsError):
    """`publish` after `shutdown`: the batch was not accepted."""
