"""Which implementation of the mirror and of the estimates serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import cast

from router.index import IndexImplementation, SourceId
from router.mirror.approximate import ApproximateCaches
from router.mirror.mirror import Mirror


def create_mirror(
    indexes: IndexImplementation,
    max_keys: int = 1_048_576,
    tier_prices: Mapping[str, float] = MappingProxyType({}),
    other_price: float = 0.1,
    clock: Callable[[], float] = time.monotonic,
) -> Mirror:
    """A mirror beside indexes of one kind: the compiled one reads compiled indexes, and no others.

    Args:
        indexes: Makes all indexes that it will be asked about.
        max_keys: See `Mirror`.
        tier_prices: Of a token from a tier, by its name in upper case, in tokens to compute, until
            it was learned.
        other_price: Of one from any other tier.
        clock: See `Mirror`.
    """
    if indexes.name == "native":
        native = import_module("router.mirror.native")
        return cast(Mirror, native.NativeMirror(max_keys, clock, tier_prices, other_price))
    return Mirror(max_keys, clock, lambda tier: tier_prices.get(tier.upper(), other_price))


def create_approximate_caches(
    lost_since: Callable[[SourceId], float | None],
    mirror: Mirror,
    after_s: float,
    cache_tokens: int,
    max_keys: int,
    clock: Callable[[], float] = time.monotonic,
) -> ApproximateCaches:
    """Estimates, of the same kind as the mirror; see `ApproximateCaches`."""
    options = after_s, cache_tokens, max_keys, clock
    if isinstance(mirror, Mirror):
        return ApproximateCaches(lost_since, mirror, *options)
    native = import_module("router.mirror.native")
    return cast(ApproximateCaches, native.NativeApproximateCaches(lost_since, mirror, *options))
