"""Defines the errors of an engine's KV cache.

Messages name place, value and rule, and never carry token ids: those are prompts.
"""

from __future__ import annotations


class OffloadError(Exception):
    """Root of everything this package raises on purpose."""


class CacheConfigError(OffloadError):
    """Sizes of a cache or a tier contradict each other."""


class RequestStateError(OffloadError):
    """A call does not fit the request's state.

    For example, it allocates slots for a request that was never admitted.
    """


class BlockRangeError(OffloadError):
    """A block id or a count lies outside its pool."""


class TransferError(OffloadError):
    """A copy job's shapes, sizes or ids do not fit the tensors; nothing of it was queued."""


class TierStateError(OffloadError):
    """A prepare or complete call names a block that is not in the state the call needs."""


class BlockFileError(OffloadError):
    """A block's file is missing, unreadable, or not the block that was written."""


class EngineRequestError(OffloadError):
    """A request that the engine can never serve; the message may be shown to its client."""
