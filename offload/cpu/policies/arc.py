"""Adaptive replacement cache (ARC): keys used once and keys used again share the room by need.

N. Megiddo, D. S. Modha: "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
With c the capacity, T1 (`recent`) holds resident keys used once and T2 (`frequent`) those used
again; B1 and B2 hold keys evicted from each, called ghosts. `target` is p, the size that T1 should
have: a ghost in B1 that is stored again shows that T1 was too small, one in B2 that T2 was. A pass
over many keys that are never used again goes through T1 and leaves T2 alone.

                 evicted first                 evicted first
    B1 | ghosts |<---- T1: used once |   T2: used again ---->| ghosts | B2
                       |<- target ->|

One access at a time, without copies in flight, this is the paper's algorithm step by step. A tier
differs in these points:

1. In the paper, a request for a page that is not cached brings it in. Here a miss brings in
   nothing: the block is computed, and may be stored later or never. So cases II, III and IV run at
   `admit`, case I at `touch`, and a miss that is not stored changes nothing.
2. Blocks being copied must stay. REPLACE takes the least recent key that is not held, and if the
   list it prefers has none, takes from the other. Held keys count as part of their list, are
   outside its order, and are put at its recent end by `release`. That does not count as an access:
   a key moves from T1 to T2 only by `touch`, also while it is held.
3. Several keys may be admitted before one of them is released, and all are held until then, so they
   never evict each other. The paper's steps run for each key in turn.
4. The paper's cache never shrinks, so a ghost implies a full cache, and REPLACE runs in every case
   II and III. Here a failed copy makes a block free, and a block without a key may still be in
   flight; so the manager decides, by `evict`, whether REPLACE runs. The bounds |T1| + |B1| <= c and
   |T1| + |T2| + |B1| + |B2| <= 2c are kept as in case IV either way.
5. A key that is discarded leaves no ghost: it was not evicted, so its return shows nothing about
   the lists' sizes.
"""

from __future__ import annotations

from collections import OrderedDict

from typing_extensions import override

from offload.base import OffloadKey
from offload.cpu.policies.base import EvictionPolicy


class ResidentKeys:
    """T1 or T2: resident keys in order, and held ones outside it."""

    def __init__(self) -> None:
        self.idle: OrderedDict[OffloadKey, None] = OrderedDict()
        """Not held, least recent first."""
        self.held: set[OffloadKey] = set()

    def __len__(self) -> int:
        return len(self.idle) + len(self.held)

    def hold(self, key: OffloadKey) -> None:
        """Take an idle key out of the order."""
        del self.idle[key]
        self.held.add(key)

    def release(self, key: OffloadKey) -> None:
        """Put a held key at the recent end of the order."""
        self.held.remove(key)
        self.idle[key] = None

    def discard(self, key: OffloadKey) -> None:
        """Remove a key; no error if it is not here."""
        self.idle.pop(key, None)
        self.held.discard(key)

    def clear(self) -> None:
        """Remove every key."""
        self.idle.clear()
        self.held.clear()


class ARCPolicy(EvictionPolicy):
    """ARC for `capacity` blocks; remembers up to twice as many keys, resident and evicted."""

    def __init__(self, capacity: int) -> None:
        """
        Args:
            capacity: c of the paper, in blocks.
        """
        self.capacity = capacity
        self.target = 0.0
        """p of the paper, in blocks, between 0 and the capacity."""
        self.recent = ResidentKeys()
        self.frequent = ResidentKeys()
        self.recent_ghosts: OrderedDict[OffloadKey, None] = OrderedDict()
        """B1, first evicted first."""
        self.frequent_ghosts: OrderedDict[OffloadKey, None] = OrderedDict()
        """B2, first evicted first."""

    @override
    def touch(self, key: OffloadKey) -> None:
        """Case I: the key is frequent from now on."""
        if key in self.recent.idle:
            del self.recent.idle[key]
            self.frequent.idle[key] = None
        elif key in self.recent.held:
            self.recent.held.remove(key)
            self.frequent.held.add(key)
        elif key in self.frequent.idle:
            self.frequent.idle.move_to_end(key)

    @override
    def admit(self, key: OffloadKey, evict: bool) -> OffloadKey | None:
        if key in self.recent_ghosts:
            return self._readmit_recent_ghost(key, evict)
        if key in self.frequent_ghosts:
            return self._readmit_frequent_ghost(key, evict)
        victim = self._make_room_for_unknown(evict)
        self.recent.held.add(key)
        return victim

    @override
    def hold(self, key: OffloadKey) -> None:
        (self.recent if key in self.recent.idle else self.frequent).hold(key)

    @override
    def release(self, key: OffloadKey) -> None:
        (self.recent if key in self.recent.held else self.frequent).release(key)

    @override
    def discard(self, key: OffloadKey) -> None:
        self.recent.discard(key)
        self.frequent.discard(key)

    @override
    def clear(self) -> None:
        self.target = 0.0
        for keys in (self.recent, self.frequent, self.recent_ghosts, self.frequent_ghosts):
            keys.clear()

    def _readmit_recent_ghost(self, key: OffloadKey, evict: bool) -> OffloadKey | None:
        """Case II: T1 should have been larger."""
        step = max(1.0, len(self.frequent_ghosts) / len(self.recent_ghosts))
        self.target = min(self.target + step, float(self.capacity))
        victim = self._replace(wanted_frequent=False) if evict else None
        del self.recent_ghosts[key]
        self.frequent.held.add(key)
        return victim

    def _readmit_frequent_ghost(self, key: OffloadKey, evict: bool) -> OffloadKey | None:
        """Case III: T2 should have been larger."""
        step = max(1.0, len(self.recent_ghosts) / len(self.frequent_ghosts))
        self.target = max(self.target - step, 0.0)
        victim = self._replace(wanted_frequent=True) if evict else None
        del self.frequent_ghosts[key]
        self.frequent.held.add(key)
        return victim

    def _make_room_for_unknown(self, evict: bool) -> OffloadKey | None:
        """Case IV: drop a ghost so that the key fits the bounds, then evict if asked to."""
        keys_used_once = len(self.recent) + len(self.recent_ghosts)
        if len(self.recent) == self.capacity:
            # The paper keeps no ghost here: T1 by itself fills the bound on |T1| + |B1|.
            return self.recent.idle.popitem(last=False)[0]
        if keys_used_once == self.capacity:
            self.recent_ghosts.popitem(last=False)
        elif keys_used_once + len(self.frequent) + len(self.frequent_ghosts) == 2 * self.capacity:
            self.frequent_ghosts.popitem(last=False)
        return self._replace(wanted_frequent=False) if evict else None

    def _replace(self, wanted_frequent: bool) -> OffloadKey:
        """REPLACE: evict a key from T1 or T2; it becomes a ghost."""
        above_target = len(self.recent) > self.target or (
            wanted_frequent and len(self.recent) == self.target
        )
        if (above_target and self.recent.idle) or not self.frequent.idle:
            keys, ghosts = self.recent, self.recent_ghosts
        else:
            keys, ghosts = self.frequent, self.frequent_ghosts
        victim, _ = keys.idle.popitem(last=False)
        ghosts[victim] = None
        return victim
