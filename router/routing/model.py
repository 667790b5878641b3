"""One base model: its names, its index, and the hints to its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from router.config.models import StoreConfig
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints
from router.index.mirror_types import STEP
from router.routing.steering import Steering


@dataclass(slots=True)
class Model:
    """One base model. `ModelSet` has its tokenisation."""

    name: str
    aliases: tuple[str, ...] = ()
    hints: LayoutHints = field(default_factory=LayoutHints)
    index: PrefixIndex = field(default_factory=PrefixIndex)
    stores: tuple[StoreConfig, ...] = ()
    """The stores that its replicas share."""
    retention_hints: Literal["auto", "always", "never"] = "auto"
    """Selects the replicas that get retention hints."""
    steering: Steering = field(default_factory=Steering)
    """Makes the hints."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name under which replicas serve it."""
        return (self.name, *self.aliases)

    def hints_of(self, replica_id: str) -> LayoutHints:
        """Return the configuration of a replica's cache, and of the stores it shares."""
        shared = tuple(store.to_hint() for store in self.stores if store.is_shared_by(replica_id))
        return replace(self.hints, stores=shared)

    def count_outcome(self, named: Sequence[int], source: SourceId, cached_tokens: int) -> None:
        """Do as `Steering.count_outcome` for a prompt that is sent to a cache."""
        announced = self.index.announced(source)
        step = STEP if announced is None else announced.scheduler_block_size or STEP
        self.steering.count_outcome(named, cached_tokens, step)
