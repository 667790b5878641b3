"""A recorded service's requests: their times, lengths and shared prefixes, with synthetic tokens.

The format is Mooncake's: one JSON object per line with `timestamp` (ms), `input_length`,
`output_length`, and `hash_ids`, one id per 512 tokens of the prompt. Equal leading ids are a shared
prefix.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulation.workload import Arrival, WorkloadSize

ID_TOKENS = 512
_FIRST_TOKEN = 1000
"""Above all bytes, in which responses are written."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The part of a recording that is used, and how it is changed."""

    requests: int
    longest_prompt: int
    """The bound in tokens; longer prompts are left out."""
    answer_share: float = 1.0
    """Responses are cut to this share of their length: simulated decoding costs real time."""
    skipped: int = 0
    """Requests at its beginning that are left out."""


class RecordedTrace:
    """Requests at recorded times, scaled to a rate."""

    def __init__(
        self, rows: Sequence[dict[str, Any]], options: TraceOptions, requests_per_s: float
    ) -> None:
        self._rows = rows
        first, last = rows[0]["timestamp"], rows[-1]["timestamp"]
        self._scale = (len(rows) - 1) / requests_per_s / max(last - first, 1)
        self._first = first
        self._answer_share = options.answer_share
        self.size = trace_size(rows, options)
        self.ends_s = (last - first) * self._scale

    def arrivals(self) -> list[Arrival]:
        """See `Workload`."""
        return [
            Arrival(
                request_id=f"request-{place}",
                at_s=(row["timestamp"] - self._first) * self._scale,
                session=_session(row),
                answer_tokens=_answer_tokens(row, self._answer_share),
                place=place,
            )
            for place, row in enumerate(self._rows)
        ]

    def prompt(self, arrival: Arrival) -> list[int]:
        """See `Workload`."""
        row = self._rows[arrival.place]
        tokens = [token for hash_id in row["hash_ids"] for token in tokens_of(hash_id)]
        return tokens[: row["input_length"]]

    def shared_ends(self, arrival: Arrival) -> Sequence[int]:  # noqa: ARG002
        """See `Workload`: what was recorded knows no messages."""
        return ()

    def answered(self, arrival: Arrival, answer: Sequence[int], now_s: float) -> None:  # noqa: ARG002
        """See `Workload`: the times were recorded."""
        return


def read_trace(path: Path, options: TraceOptions) -> list[dict[str, Any]]:
    """Return the first requests of a recording, plain or .gz, that are short enough, in the order
    of their times."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [
            row
            for row in map(json.loads, lines)
            if 2 <= row["input_length"] <= options.longest_prompt
        ]
    return sorted(rows, key=lambda row: int(row["timestamp"]))[
        options.skipped : options.skipped + options.requests
    ]


def trace_size(rows: Sequence[dict[str, Any]], options: TraceOptions) -> WorkloadSize:
    """Return the sizes of these requests."""
    return WorkloadSize(
        prompt_tokens=sum(row["input_length"] for row in rows) / len(rows),
        longest_tokens=max(
            row["input_length"] + _answer_tokens(row, options.answer_share) for row in rows
        ),
    )


def tokens_of(hash_id: int) -> range:
    """Return the tokens for an id, the same every time and those of no other id."""
    start = _FIRST_TOKEN + hash_id * ID_TOKENS
    return range(start, start + ID_TOKENS)


def _session(row: dict[str, Any]) -> str:
    # The recording names no sessions. All its prompts begin with one block; the second tells
    # conversations apart.
    ids = row["hash_ids"]
    return str(ids[min(1, len(ids) - 1)])


def _answer_tokens(row: dict[str, Any], share: float) -> int:
    return max(1, round(float(row["output_length"]) * share))
