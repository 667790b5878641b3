"""The longest prompt of a model, as its replicas report it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.errors import PromptTooLong
from router.fleet.replica import Replica
from router.prompt.endpoints import FORMS, Endpoint
from router.prompt.prompts import TokenizedPrompt

_CUTS = "sglang"
"""Owner of the models of an engine that has an option to cut instead of refusing."""


def common_length(replicas: Iterable[Replica], name: str | None) -> int | None:
    """Return how many tokens a model takes; None where replicas do not report it, or differ."""
    lengths = {entry.get("max_model_len") for entry in _entries(replicas, name)}
    length = lengths.pop() if len(lengths) == 1 else None
    return length if type(length) is int and length > 0 else None


def longest_certain(replicas: Iterable[Replica], name: str | None) -> int | None:
    """The most tokens that any replica takes; None where that is not certain."""
    longest = 0
    for entry in _entries(replicas, name):
        length = entry.get("max_model_len")
        if type(length) is not int or length < 1 or entry.get("owned_by") == _CUTS:
            return None
        longest = max(longest, length)
    return longest or None


def check_length(
    endpoint: Endpoint,
    tokenized: Sequence[TokenizedPrompt],
    replicas: Iterable[Replica],
    name: str | None,
) -> None:
    """Refuse what every replica would refuse, before it is hashed and sent.

    Only what is certain: all token ids are known, all replicas report a length, and none cuts.

    Args:
        tokenized: Its prompts, as they would be sent.
    Raises:
        PromptTooLong: One of the prompts is longer than any of *replicas* takes.
    """
    tokens = max((len(prompt.token_ids) for prompt in tokenized if prompt.exact), default=0)
    is_sent = endpoint is not Endpoint.ROUTE
    if not is_sent or not FORMS[endpoint].generates or not tokens:
        return
    longest = longest_certain(replicas, name)
    if longest is not None and longest < tokens:
        raise PromptTooLong(tokens, longest)


def _entries(replicas: Iterable[Replica], name: str | None) -> Iterable[dict[str, object]]:
    """Yield each replica's entry for the model; an empty one where it reports none. An adapter's
    entry has no length: that of its model counts."""
    for replica in replicas:
        served = replica.served.models
        found = [
            entry
            for entry_name, entry in replica.model_entries.items()
            if entry_name in served or (entry_name == name and not entry.get("parent"))
        ]
        yield from found or [{}]
