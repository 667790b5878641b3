"""Holds the core's reading of HTTP to httptools and h11, over mutated messages of real clients and
engines.

`python -m tests.router.core.http.fuzz --inputs 10000000`. Of every input:

    ours and httptools read it         they must have read the same, message for message
    ours reads a message, and          h11 must read it too: the same, to the same end. It is twenty
    httptools refuses it               times slower than the others, so it is asked only then
    ours waits for more, and           h11 must wait too: a reader that waits for bytes which never
    httptools has read a message       come has taken them for a part of something else
    ours refuses, and httptools        counted: ours is the stricter one
    has read a message

A disagreement of the first three kinds is printed, and makes the exit status 1. Two things do not
reach h11 as they came. It skips no empty lines before a request (RFC 9112 2.2), so it gets none.
And it reads `content-length` and `transfer-encoding` in trailers, where they mean nothing: where
it refuses them, they get another name.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from router._core import read_requests, read_responses
from tests.router.core.http.messages import REQUESTS, RESPONSES, mutated
from tests.router.core.http.oracles import (
    Request,
    Response,
    h11_request,
    h11_response,
    httptools_requests,
    httptools_responses,
    normal,
)

Message = Request | Response
KEPT = 20
"""Examples of each kind."""
BATCH = 50_000
_TRAILERS = re.compile(rb"(?s)(.*\r\n0+(?:;[^\r\n]*)?\r\n)(.*)")
_FRAMING = re.compile(rb"(?im)^(?:content-length|transfer-encoding):")


@dataclass(frozen=True, slots=True)
class Side:
    """Requests or responses: what they are made of, and who reads them."""

    messages: tuple[bytes, ...]
    ours: Callable[[bytes], tuple[list[tuple[Message, int]], str]]
    httptools: Callable[[bytes], list[Any]]
    h11: Callable[[bytes], tuple[Any, int] | None]


@dataclass
class Findings:
    """What came of some inputs."""

    counts: Counter[str] = field(default_factory=Counter)
    disagreements: list[tuple[str, bytes]] = field(default_factory=list)
    stricter: list[bytes] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Take in those of another batch."""
        self.counts += other.counts
        self.disagreements = (self.disagreements + other.disagreements)[:KEPT]
        self.stricter = (self.stricter + other.stricter)[:KEPT]


def our_requests(data: bytes) -> tuple[list[tuple[Message, int]], str]:
    messages, end = read_requests(data)
    return [
        (Request(method, target, minor, normal(fields), body), at)
        for method, target, minor, fields, body, at in messages
    ], end


def our_responses(data: bytes) -> tuple[list[tuple[Message, int]], str]:
    messages, end = read_responses(data)
    return [
        (Response(status, minor, normal(fields), body), at)
        for status, minor, fields, body, at in messages
    ], end


SIDES = (
    Side(REQUESTS, our_requests, httptools_requests, h11_request),
    Side(RESPONSES, our_responses, httptools_responses, h11_response),
)


def compare(side: Side, data: bytes, findings: Findings) -> None:
    """Let all who must read one input."""
    counts = findings.counts
    ours, end = side.ours(data)
    theirs = side.httptools(data)
    start = 0
    for number, (message, at) in enumerate(ours):
        if number < len(theirs):
            kind = "the same as httptools" if theirs[number] == message else "READ DIFFERENTLY"
        else:
            counts["h11 asked"] += 1
            kind = judged_by_h11(side, message, data[start:], at - start)
        counts[kind] += 1
        if kind.isupper():
            findings.disagreements.append((kind, data))
            return
        start = at
    counts[f"then {end}"] += 1
    if len(theirs) <= len(ours) or end == "whole":
        return
    if end == "partial":
        counts["h11 asked"] += 1
        if side.h11(data[start:]) is not None:
            counts["WAITS FOR MORE"] += 1
            findings.disagreements.append(("WAITS FOR MORE", data))
    else:
        counts["stricter than httptools"] += 1
        findings.stricter.append(data)


def judged_by_h11(side: Side, message: Message, data: bytes, end: int) -> str:
    """Whether h11 reads that message, too.

    Args:
        side: Requests or responses.
        message: As we have read it.
        data: Begins with it.
        end: Where it ends.
    """
    if side.h11(data) == (message, end):
        return "the same as h11, refused by httptools"
    if parts := _TRAILERS.fullmatch(data[:end]):
        renamed = parts[1] + _FRAMING.sub(b"x:", parts[2])
        if side.h11(renamed) == (message, len(renamed)):
            return "the same as h11, but for framing in trailers"
    return "ACCEPTED BY NOBODY ELSE"


def run(inputs: int, seed: int) -> Findings:
    """Compare mutated messages.

    Args:
        inputs: How many.
        seed: Of the mutations.
    """
    random, findings = Random(seed), Findings()
    for _ in range(inputs):
        side = SIDES[random.random() < 0.3]
        message = side.messages[int(random.random() * len(side.messages))]
        compare(side, mutated(random, message, side.messages), findings)
    findings.counts["inputs"] += inputs
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="where ours is the stricter one")
    arguments = parser.parse_args()
    findings, began = Findings(), time.monotonic()
    batches = range(-(-arguments.inputs // BATCH))
    seeds = (arguments.seed * 1_000_003 + batch for batch in batches)
    size = min(BATCH, arguments.inputs)
    with ProcessPoolExecutor(arguments.processes) as pool:
        for found in pool.map(partial(run, size), seeds):
            findings.add(found)
    for kind, count in sorted(findings.counts.items()):
        print(f"{count:>12,}  {kind}")
    print(f"{time.monotonic() - began:>12,.0f}  seconds")
    for kind, data in findings.disagreements:
        print(kind, data)
    if arguments.show:
        print(*findings.stricter, sep="\n")
    return 1 if findings.disagreements else 0


if __name__ == "__main__":
    sys.exit(main())
