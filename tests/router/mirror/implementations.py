"""The mirror in Python and the compiled one. Tests of what the router uses of them run on each; the
others of this folder look inside the one in Python."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from router.mirror import Mirror, create_mirror

IMPLEMENTATIONS = ("python", "native")


class Chosen:
    """The one that the tests of a module run on now."""

    name = "python"


def choose(name: str) -> None:
    """Choose one of them."""
    Chosen.name = name


def python_mirror(
    max_keys: int = 1_048_576,
    tier_prices: Mapping[str, float] = MappingProxyType({}),
    other_price: float = 0.1,
    **options: Any,
) -> Mirror:
    """The one in Python, made as `create_mirror` makes the other."""

    def price_of(tier: str) -> float:
        return tier_prices.get(tier.upper(), other_price)

    return Mirror(max_keys, load_price=price_of, **options)


def new_mirror(**options: Any) -> Mirror:
    """A mirror of the one that was chosen."""
    return python_mirror(**options) if Chosen.name == "python" else create_mirror(**options)
