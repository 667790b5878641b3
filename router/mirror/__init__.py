"""What every cache is doing and will evict next, from the requests that this router sent there.

Events say what a cache holds; they do not say who used it last. The router knows: it sent the
requests. So it keeps, for every cache, the requests in the order of their end with what each was
the last to use, which is the order in which an engine evicts (least recently used first). From the
same requests it learns how long it takes until something is used again, and how fast a replica
works. The compiled core does so (`core/mirror/`); `tests/oracle/mirror/` has it in Python.

The files; each imports only what is listed above it:

    types.py       what goes in and out
    mirror.py      every cache: requests in prefill, ended ones in order, what is evicted next
    approximate.py what a cache holds whose events are not there
"""

from router._core import EstimatedVisit as ApproximateVisit
from router._core import Visit
from router.mirror.approximate import ApproximateCache, ApproximateCaches
from router.mirror.mirror import Mirror
from router.mirror.types import (
    STEP,
    WORTH_TELLING,
    ApproximateStatistics,
    CacheOutlook,
    Coming,
    MirrorStatistics,
    Prefilling,
)

__all__ = [
    "STEP",
    "WORTH_TELLING",
    "ApproximateCache",
    "ApproximateCaches",
    "ApproximateStatistics",
    "ApproximateVisit",
    "CacheOutlook",
    "Coming",
    "Mirror",
    "MirrorStatistics",
    "Prefilling",
    "Visit",
]
