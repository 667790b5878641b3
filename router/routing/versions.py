"""Chooses the version of a model that a request gets, where its name stands for several: the one
that its header chooses, else one by weight, and the same for all requests of a session.

Sessions are shared out by weighted rendezvous hashing (Schindelhauer & Schomaker, 2005), as in the
policy `session`: when weights change, only as many sessions move as must, and all routers agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from random import Random

from router.config.models import VersionConfig, VersionedModelConfig


class Versions:
    """All names that stand for several models.

    Args:
        random: Draws for requests without a session.
    """

    def __init__(
        self, configured: Iterable[VersionedModelConfig] = (), random: Random | None = None
    ) -> None:
        self._by_name = {each.name: each for each in configured}
        self._random = random or Random()

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def models_of(self, name: str) -> tuple[str, ...]:
        """The models that a name stands for; none if it is not one of these names."""
        found = self._by_name.get(name)
        return () if found is None else tuple(version.model for version in found.versions)

    def names(self) -> list[str]:
        return list(self._by_name)

    def choose(
        self,
        name: str | None,
        headers: Mapping[bytes, bytes],
        session: str | None,
        is_served: Callable[[str], bool],
    ) -> str | None:
        """Return the model for a request; None if its name stands for itself.

        Args:
            is_served: Returns whether a healthy replica serves a model. Others are left out where
                there is a choice, unless the client made it.
        """
        found = self._by_name.get(name or "")
        if found is None:
            return None
        asked = headers.get(found.header.encode(), b"").decode("latin-1").strip()
        model = next((each.model for each in found.versions if each.chosen_by == asked), None)
        if model is None:
            weighted = [version for version in found.versions if version.weight]
            able = [version for version in weighted if is_served(version.model)] or weighted
            model = self._by_weight(able, session)
        return model

    def _by_weight(self, versions: Sequence[VersionConfig], session: str | None) -> str:
        if session is None:
            weights = [version.weight for version in versions]
            return self._random.choices(versions, weights)[0].model
        text = session.encode("utf-8", "surrogatepass")
        return min(versions, key=lambda version: _draw(text, version)).model


def _draw(session: bytes, version: VersionConfig) -> float:
    """Exponentially distributed, at the rate of the weight: the least one wins."""
    model = version.model.encode()
    drawn = blake2b(b"%d:%b%b" % (len(model), model, session), digest_size=8).digest()
    uniform = (int.from_bytes(drawn, "big") + 1) / 2**64
    return -math.log(uniform) / version.weight
