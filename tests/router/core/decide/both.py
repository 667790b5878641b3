"""The mirror and its oracle side by side: each call goes to both, and whatever they
say must be the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from router.index.base import SourceId
from router.index.mirror import Mirror
from router.index.mirror_types import Prefilling
from router.index.prompt import HashedPrompt
from tests.oracle.mirror.mirror import ReferenceMirror
from tests.support.index import Coming, ended, in_prefill, load_prices, outlook, reuse_probability


def same(python: Any, native: Any) -> Any:
    """Expect equal values, floats as equal as a different order of sums may leave them."""
    assert is_same(python, native), f"python says {python!r}, native {native!r}"
    return python


def is_same(python: Any, native: Any) -> bool:
    """See `same`."""
    if isinstance(python, float) and isinstance(native, float):
        return python == native or math.isclose(python, native, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(python, dict):
        return python.keys() == native.keys() and all(
            is_same(value, native[key]) for key, value in python.items()
        )
    if isinstance(python, (list, tuple)):
        return len(python) == len(native) and all(map(is_same, python, native))
    return bool(python == native)


class BothVisits:
    """One request in both."""

    def __init__(self, python: Any, native: Any) -> None:
        self._both = python, native
        self.expected_tokens = same(python.expected_tokens, native.expected_tokens)

    def first_token(self, is_timed: bool = True) -> None:
        for visit in self._both:
            visit.first_token(is_timed)

    def ended(self, was_served: bool = True) -> None:
        for visit in self._both:
            visit.ended(was_served)


class BothMirrors:
    """As `Mirror`; both see one time."""

    def __init__(self, max_keys: int = 1_048_576, clock: Callable[[], float] = lambda: 0.0) -> None:
        prices = {"CPU": 0.2}
        self.python = ReferenceMirror(max_keys, clock, lambda tier: prices.get(tier.upper(), 0.1))
        self.native = Mirror(max_keys, prices, 0.1, clock)
        self.books = self.native.books
        self.number_of_model = self.native.number_of_model

    # --- what is sent ---

    def begin(self, *arguments: Any, **options: Any) -> BothVisits:
        visits = [each.begin(*arguments, **options) for each in (self.python, self.native)]
        return BothVisits(*visits)

    def forget(self, replica: str) -> None:
        for each in (self.python, self.native):
            each.forget(replica)

    def forget_model(self, model: str) -> None:
        for each in (self.python, self.native):
            each.forget_model(model)

    def hear(self, others: Sequence[Prefilling]) -> None:
        for each in (self.python, self.native):
            each.take_others(others)

    # --- what they say ---

    def prefill_tokens_per_s(self, model: str) -> float:
        return self._same("prefill_tokens_per_s", model)

    def reuse_probability(self, model: str, idle_s: float) -> float:
        native = reuse_probability(self.native, model, idle_s)
        found: float = same(self.python.reuse_probability(model, idle_s), native)
        return found

    def statistics(self) -> Any:
        return self._same("statistics")

    def outlook(self, *arguments: Any) -> Any:
        native = outlook(self.native, *arguments)
        return same(self.python.outlook(*arguments), native)

    def outlooks(
        self,
        model: str,
        sources: Sequence[SourceId],
        capacity_of: Callable[[int], int | None],
        now: float,
    ) -> Any:
        progress, found = self.python.outlooks(model, sources, capacity_of, now)
        python = [(each, *rest) for each, rest in zip(progress, found, strict=True)]
        return same(
            python,
            [
                outlook(self.native, model, source, capacity_of(number), now)
                for number, source in enumerate(sources)
            ],
        )

    def in_prefill(self, prompt: HashedPrompt, tokens: int = 0) -> dict[SourceId, Coming]:
        found: dict[SourceId, Coming] = same(
            self.python.in_prefill(prompt, tokens), in_prefill(self.native, prompt, tokens)
        )
        return found

    def expected(self, *arguments: Any) -> int:
        found: int = self._same("expected", *arguments)
        return found

    def ended(self, source: SourceId) -> list[tuple[list[int], float]]:
        python = [(list(keys), at) for keys, at in self.python.ended(source)]
        found: list[tuple[list[int], float]] = same(python, ended(self.native, source))
        return found

    def load_prices(self, source: SourceId) -> Any:
        python, native = self.python.load_prices(source), load_prices(self.native, source)
        assert (python is None) == (native is None)
        for tier in ("CPU", "cpu", "DISK", ""):
            if python is not None and native is not None:
                same(python.of(tier), native.of(tier))
        by_tier = [("CPU", 100), ("DISK", 28)]
        if python is not None and native is not None:
            same(python.mean(by_tier), native.mean(by_tier))
            same(python.mean(()), native.mean(()))
        return python

    def prefilling(self) -> list[Prefilling]:
        """Their numbers begin anywhere."""
        python, native = self.python.prefilling(), self.native.prefilling()
        told = [[_without_number(each) for each in found] for found in (python, native)]
        same(*told)
        assert python == sorted(python, key=attrgetter("number"))
        assert native == sorted(native, key=attrgetter("number"))
        assert all(
            one is other for one, other in zip(native, self.native.prefilling(), strict=True)
        )
        return python

    def _same(self, method: str, *arguments: Any) -> Any:
        return same(
            getattr(self.python, method)(*arguments), getattr(self.native, method)(*arguments)
        )


def _without_number(each: Prefilling) -> tuple[Any, ...]:
    return each.model, each.source, each.tokens, each.queued_tokens, list(each.keys)
