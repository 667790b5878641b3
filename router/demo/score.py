"""What the demo counts: where requests went, and predictions against the recorded truth."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ReplicaScore:
    """One replica's recording so far."""

    stream: str
    batches: int = 0
    blocks: dict[str, int] = field(default_factory=dict)
    """`group/tier` -> blocks the router believes to be there."""
    queries: int = 0
    exact: int = 0
    predicted_tokens: int = 0
    hit_tokens: int = 0
    sent_here: int = 0
    """Requests of any recording that the router sent to this replica."""

    def add(self, predicted: int, hit: int) -> None:
        self.queries += 1
        self.exact += predicted == hit
        self.predicted_tokens += predicted
        self.hit_tokens += hit


@dataclass(slots=True)
class Score:
    """The whole run."""

    replicas: dict[str, ReplicaScore]
    answers_compared: int = 0
    """Answers whose `cached_tokens` was held against the header `x-kv-hit-tokens`."""
    answers_exact: int = 0
    with_hit: int = 0
    to_holder: int = 0
    """Requests with a hit that went to the replica that had it."""

    @property
    def queries(self) -> int:
        return sum(score.queries for score in self.replicas.values())

    @property
    def exact(self) -> int:
        return sum(score.exact for score in self.replicas.values())

    @property
    def is_perfect(self) -> bool:
        return self.queries > 0 and self.exact == self.queries and self.answers_exact == self.answers_compared
