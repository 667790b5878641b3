"""API keys, which must never show up anywhere."""

from __future__ import annotations

import hmac


class Secret:
    """A key that does not print itself. Where it is needed, `reveal` gives it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The key itself, for a header. Never for a log, a message or an answer."""
        return self._value

    def matches(self, candidate: str) -> bool:
        """Whether *candidate* is the key, in a time that does not tell how much of it is right."""
        return hmac.compare_digest(self._value.encode(), candidate.encode("utf-8", "surrogatepass"))

    def __repr__(self) -> str:
        return "Secret(***)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.matches(other._value)

    def __hash__(self) -> int:
        return hash(self._value)
