"""One request from its arrival to its end, as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvroute_engine.core.requests import EngineRequest
from offload.request import CacheRequest


class SequenceState(Enum):
    """The state of a sequence."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class SequenceInProgress:
    """A prompt and the tokens generated behind it."""

    request: EngineRequest
    cache: CacheRequest
    max_tokens: int
    """Length at which it ends, prompt and output."""
    number: int
    """The number of its arrival, counted from 0."""
    arrived_at: int
    """Prompt tokens that the engine had computed by then: its clock for those that wait."""
    state: SequenceState = SequenceState.WAITING
    num_cached_tokens: int | None = None
    """Set at the first admission."""
    group_hits: tuple[int, ...] = ()
    """Longest prefix that each group alone could serve, in tokens; waiting for admission."""
    group_hits_at: int = -1
    """The hit of all groups together when `group_hits` was looked up; -1 before that."""
    loaded_tokens: int = 0
    """Position at which it continues once its load has finished."""
    loads_at_first: bool = False
    """Its load belongs to the first admission, which has not happened if the load fails."""
    output: list[int] = field(default_factory=list)

    @property
    def num_tokens_left(self) -> int:
        """Return how many tokens to compute before the next one can be chosen; 1 in decode."""
        return self.cache.num_tokens - self.cache.num_computed_tokens
