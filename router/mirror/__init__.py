"""What every cache is doing and will evict next, from the requests that this router sent there.

Events say what a cache holds; they do not say who used it last. The router knows: it sent the
requests. So it keeps, for every cache, the requests in the order of their end with what each was
the last to use, which is the order in which an engine evicts (least recently used first). From the
same requests it learns how long it takes until something is used again, and how fast a replica
works.

The files; each imports only what is listed above it:

    ownership.py   which of several requests used each part of a prefix last
    prefix_tree.py how much of a prompt others share
    layout.py      where hits can end, and how many blocks prompts take
    in_prefill.py  prompts that are being computed, and how much of them a new one shares
    eviction.py    what is evicted next, and how much prompts evict
    traffic.py     rates, and how probable it is that what is idle will be used again
    loading.py     what it costs to load from below the GPU
    mirror.py      every cache: requests in prefill, ended ones in order, what is evicted next
    approximate.py what a cache holds whose events are not there
    native.py      the last two, compiled, behind the same interface
"""

from router.mirror.approximate import (
    ApproximateCache,
    ApproximateCaches,
    ApproximateStatistics,
    ApproximateVisit,
)
from router.mirror.in_prefill import Coming, are_equal
from router.mirror.layout import STEP
from router.mirror.mirror import (
    WORTH_TELLING,
    CacheOutlook,
    Mirror,
    MirrorStatistics,
    Prefilling,
    Visit,
)
from router.mirror.native import create_approximate_caches, create_mirror
from router.mirror.traffic import FadingRatio

__all__ = [
    "STEP",
    "WORTH_TELLING",
    "ApproximateCache",
    "ApproximateCaches",
    "ApproximateStatistics",
    "ApproximateVisit",
    "CacheOutlook",
    "Coming",
    "FadingRatio",
    "Mirror",
    "MirrorStatistics",
    "Prefilling",
    "Visit",
    "are_equal",
    "create_approximate_caches",
    "create_mirror",
]
