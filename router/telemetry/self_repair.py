"""Finds sources that are predicted wrongly for long, and has them rebuilt.

The evidence is every comparison of a prediction with what the engine reported, if it was made in a
quiet moment: nothing else ran at that replica, its stream was live, and its events had had time to
arrive. There a prediction is exact, so a few wrong ones are a fault.

    state       finding    next state   done
    trusted     wrong      rebuilt      the source is rebuilt, unless that was done a moment ago
    rebuilt     right      trusted
    rebuilt     wrong      lasting      shown, with the likely cause
    lasting     right      trusted      the cause was removed

A rebuild repairs a picture that was spoiled. An error that returns comes from elsewhere (a seed, a
salt, a tokenizer, an unknown group) and is shown, not rebuilt again and again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, NamedTuple

from kvevents.field_docs import counter, flag
from router.fleet.quiet_moments import QuietMoments
from router.index.base import SourceId

WINDOW = 16
"""The number of last comparisons that count."""
WRONG_ENOUGH = 4
"""Wrong ones among them that are not chance."""


class RepairTimes(NamedTuple):
    """Times of the repair, in seconds."""

    wrong_for_s: float = 60.0
    """From the first wrong comparison to the last: an engine whose cache was reset is wrong once or
    twice."""
    cool_down_s: float = 600.0
    """The least time between two rebuilds of one source."""
    quiet_s: float = 1.0
    """Since the last request at a replica: by then its events have arrived."""


class Trust(str, Enum):
    """The trust in the predictions of a source."""

    TRUSTED = "trusted"
    REBUILT = "rebuilt"
    """They were wrong; the source was rebuilt, and the next comparisons decide."""
    LASTING = "lasting"
    """They stayed wrong after a rebuild."""


class Finding(Enum):
    """Names the result of the last comparisons."""

    RIGHT = "right"
    WRONG = "wrong"


TABLE: Mapping[tuple[Trust, Finding], Trust] = {
    (Trust.TRUSTED, Finding.WRONG): Trust.REBUILT,
    (Trust.REBUILT, Finding.RIGHT): Trust.TRUSTED,
    (Trust.REBUILT, Finding.WRONG): Trust.LASTING,
    (Trust.LASTING, Finding.RIGHT): Trust.TRUSTED,
}
"""Pairs that are left out change nothing."""


class Cause(str, Enum):
    """Names what lasting wrong predictions likely come from: sentences whose subject is the
    replica."""

    SALT = "only prompts with a cache_salt: its events do not show the salt, or show another"
    ADAPTER = "only prompts for a LoRA adapter: the adapter goes into its hashes in an unknown way"
    MEDIA = "only prompts with images or audio: they go into its hashes in an unknown way"
    HASH_SEED = "hits are never predicted, and blocks cannot be placed: its hash seed is not known"
    TOKENIZER = "no hit comes as predicted: its tokenizer, chat template or BOS token differs"
    EAGLE = "always one block too many: it drafts with EAGLE or MTP; set layout.eagle"
    NO_EAGLE = "always one block too few: it does not draft; check layout.eagle"
    BLOCK_SIZE = "hits end within blocks: its block size is another"
    MISSING_GROUP = "too many: it has a KV cache group or window that is not known (layout.groups)"
    UNSEEN_BLOCKS = "too few: it reuses blocks that its events do not show, as of another tier"
    TWO_ENGINES = "sometimes too many, sometimes too few: two engines may share its addresses"


class Comparison(NamedTuple):
    """One prediction beside the engine's report."""

    at: float
    """Seconds on a monotonic clock."""
    predicted: int
    actual: int
    has_salt: bool = False
    has_adapter: bool = False
    has_media: bool = False

    @property
    def is_wrong(self) -> bool:
        return self.predicted != self.actual


class CacheFacts(NamedTuple):
    """Holds the index's facts on a source that separate causes."""

    block_size: int | None = None
    """Tokens in a hit's smallest step; None where it is not known."""
    has_unplaced: bool = False
    """True if it holds blocks that no prompt can find."""


@dataclass(frozen=True, slots=True)
class TrustStatistics:
    """The trust in a source's predictions."""

    state: Trust
    rebuilds: Annotated[int, counter("kvroute_source_rebuilds")]
    """Rebuilds of a source because its hits were predicted wrongly."""
    cause: Annotated[
        Cause | None,
        flag(
            "kvroute_source_mispredicted",
            "1 while a source's hits are predicted wrongly and a rebuild did not help, or has to "
            "wait for the cool-down.",
        ),
    ]
    """The likely cause, while they stay wrong and a rebuild did not help or has to wait."""


@dataclass(slots=True)
class SourceTrust:
    """The evidence on one source. Pure: the time comes with each comparison."""

    times: RepairTimes
    state: Trust = Trust.TRUSTED
    rebuilds: int = 0
    cause: Cause | None = None
    _rebuilt_at: float = -math.inf
    _last: deque[Comparison] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _wrong_since: float | None = None
    """The first of the wrong ones, since there are enough of them; it may have left the window."""

    def add(self, comparison: Comparison, facts: Callable[[], CacheFacts]) -> bool:
        """Count one comparison; returns whether the source is to be rebuilt now.

        Args:
            comparison: Made in a quiet moment.
            facts: Returns the source's facts, for the likely cause; called only if needed.
        """
        if not comparison.predicted and not comparison.actual:
            return False  # a new prompt proves nothing
        self._last.append(comparison)
        finding = self._finding()
        if finding is None:
            return False
        after = TABLE.get((self.state, finding), self.state)
        is_rebuilt = after is Trust.REBUILT and self.state is not after
        is_cooling = is_rebuilt and self._is_cooling(comparison.at)
        # A rebuild may repair it; what no rebuild repairs, or none does for now, is shown.
        is_shown = finding is Finding.WRONG and (is_cooling or not is_rebuilt)
        self.cause = likely_cause(self._last, facts()) if is_shown else None
        if after is self.state or is_cooling:
            return False
        self.state = after
        self._last.clear()
        self._wrong_since = None
        if after is Trust.REBUILT:
            self.rebuilds += 1
            self._rebuilt_at = comparison.at
        return after is Trust.REBUILT

    def statistics(self) -> TrustStatistics:
        return TrustStatistics(self.state, self.rebuilds, self.cause)

    def _is_cooling(self, now: float) -> bool:
        return now - self._rebuilt_at < self.times.cool_down_s

    def _finding(self) -> Finding | None:
        wrong = [each for each in self._last if each.is_wrong]
        if len(wrong) < WRONG_ENOUGH:
            self._wrong_since = None
            return Finding.RIGHT if len(self._last) == WINDOW and len(wrong) <= 1 else None
        if self._wrong_since is None:
            self._wrong_since = wrong[0].at
        lasts_s = wrong[-1].at - self._wrong_since
        return Finding.WRONG if lasts_s >= self.times.wrong_for_s else None


def likely_cause(comparisons: Sequence[Comparison], facts: CacheFacts) -> Cause:
    """Return what only the wrong predictions have in common.

    Args:
        comparisons: One source's; some of them wrong.
    """
    wrong = [each for each in comparisons if each.is_wrong]
    right = [each for each in comparisons if not each.is_wrong]
    for name, cause in _KINDS.items():
        is_of_all_wrong = all(getattr(each, name) for each in wrong)
        if right and is_of_all_wrong and not any(getattr(each, name) for each in right):
            return cause
    if all(each.predicted == 0 for each in wrong) and facts.has_unplaced:
        return Cause.HASH_SEED
    has_hits = any(each.actual for each in wrong)
    if has_hits and all(0 in (each.predicted, each.actual) for each in wrong) and not right:
        return Cause.TOKENIZER
    return _by_difference(wrong, facts.block_size)


_KINDS = {"has_salt": Cause.SALT, "has_adapter": Cause.ADAPTER, "has_media": Cause.MEDIA}


def _by_difference(wrong: Sequence[Comparison], block_size: int | None) -> Cause:
    differences = {each.predicted - each.actual for each in wrong}
    if block_size is not None and differences == {block_size}:
        return Cause.EAGLE
    if block_size is not None and differences == {-block_size}:
        return Cause.NO_EAGLE
    # One token less than the prompt is reused where a lower tier holds all of it.
    if block_size is not None and any(
        each.actual % block_size not in (0, block_size - 1) for each in wrong
    ):
        return Cause.BLOCK_SIZE
    if min(differences) > 0:
        return Cause.MISSING_GROUP
    return Cause.UNSEEN_BLOCKS if max(differences) < 0 else Cause.TWO_ENGINES


@dataclass(eq=False, repr=False)
class SelfRepair:
    """The evidence on every source, and the rebuilds that follow from it."""

    rebuild: Callable[[SourceId], None]
    is_judged: Callable[[str, SourceId], bool]
    """Returns whether predictions of a source of a model must be right now: its stream is live, and
    it tokenises as the router does."""
    facts_of: Callable[[str, SourceId], CacheFacts]
    """Returns the index's facts on a source of a model."""
    times: RepairTimes
    is_on: bool = True
    """True: sources are rebuilt; faults are found and shown in any case."""

    def __post_init__(self) -> None:
        self.quiet = QuietMoments(self.times.quiet_s)
        self._trusts: dict[SourceId, SourceTrust] = {}

    def compare(self, model: str, source: SourceId, comparison: Comparison) -> None:
        """Count a comparison that was made in a quiet moment."""
        if not self.is_judged(model, source):
            return
        trust = self._trusts.setdefault(source, SourceTrust(self.times))
        if trust.add(comparison, lambda: self.facts_of(model, source)) and self.is_on:
            self.rebuild(source)

    def statistics(self) -> dict[SourceId, TrustStatistics]:
        """Return the trust in every source that was compared."""
        return {source: trust.statistics() for source, trust in self._trusts.items()}

    def forget(self, replica_id: str) -> None:
        self.quiet.forget(replica_id)
        for source in [source for source in self._trusts if source.replica == replica_id]:
            del self._trusts[source]
