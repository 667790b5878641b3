"""Defines the errors between a request body and its token ids.

    TokenizeError
    |-- BrokenRule                  place, value's type, rule
    |   |-- ModelFilesError         the operator's model directory cannot be used
    |   `-- ReplicaAnswerError      a replica's `/tokenize` failed, or its response is malformed
    |       `-- ReplicaRefusedError it refused this prompt
    |-- UntokenizableError          the prompt is valid, but its token ids cannot be known here
    `-- ProcessEndedError           the process that was to read a large body did not survive it

A body that breaks a rule is a `BadRequest` (`router.errors`). Messages never quote a prompt, a
token or a key: they describe values by type and size.
"""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override


class TokenizeError(Exception):
    """Base of every error raised here on purpose."""


class BrokenRule(TokenizeError):
    """Something from outside breaks a rule; it may be raised again in another process.

    Args:
        place: JSON path of the value, `$.messages[3].content`; or a file, or a replica.
        found: Type and size of the value, never the value itself.
    """

    def __init__(self, place: str, found: str, rule: str) -> None:
        super().__init__(f"{place}: {found}; {rule}")
        self.place = place
        self.found = found
        self.rule = rule

    @override
    def __reduce__(self) -> tuple[type[BrokenRule], tuple[str, str, str]]:
        return type(self), (self.place, self.found, self.rule)


class ModelFilesError(BrokenRule):
    """A file of a model directory is missing or breaks a rule."""


class UntokenizableError(TokenizeError):
    """This tokenizer cannot produce the ids of a prompt; another one may.

    Args:
        reason: Short and from a fixed set, so that it can label a metric.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ReplicaAnswerError(BrokenRule):
    """A replica responded to `/tokenize` with an error, or without a valid token list."""


class ReplicaRefusedError(ReplicaAnswerError):
    """A replica refused to tokenise this prompt, or has no `/tokenize`: nothing is wrong with
    it."""


class ProcessEndedError(TokenizeError):
    """The process that was to read a large body is out of memory, was killed or took too long."""

    def __init__(self) -> None:
        super().__init__("the process that reads large bodies ended before it was done")

    @override
    def __reduce__(self) -> tuple[type[ProcessEndedError], tuple[()]]:
        return type(self), ()


def describe(value: object) -> str:
    """Describe a value by type and size, without quoting it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "an integer" if isinstance(value, int) else "a number"
    if isinstance(value, (str, bytes)):
        return f"a string of {len(value)} characters"
    if isinstance(value, list):
        return f"a list of {len(value)} items"
    if isinstance(value, Mapping):
        return f"an object of {len(value)} fields"
    return f"a value of type {type(value).__name__}"
