"""Full attention, also MLA and attention with sinks: every token looks at all before it, so nothing
is given back early."""

from __future__ import annotations

from offload.groups.base import GroupManager


class FullAttentionManager(GroupManager):
    """Every block is held to the end, and every full one can serve a hit: the base's bookkeeping as
    it is."""
