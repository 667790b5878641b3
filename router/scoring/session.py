"""Sessions that stay where they are: consistent hashing of what the client calls its session.

Rendezvous hashing (Thaler & Ravishankar, 1998): every replica draws a number from (session,
replica), and the lowest wins. When a replica is removed, only its own sessions move, each to the
replica with its next lowest number; one that is added takes only what it wins. No ring, nothing to
rebuild, the same choice in every router. Speeds enter as in weighted rendezvous (Schindelhauer &
Schomaker, 2005): with exponentially distributed numbers a replica of speed 2 wins twice as often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from random import Random

from router.scoring.simple import LeastLoadedPolicy
from router.scoring.types import Candidate, Ranked, RouteRequest, Weights


class SessionPolicy:
    """One session, one replica, as long as it can serve; a request without a session goes to the
    least loaded."""

    def __init__(self, weights: Weights, random: Random) -> None:
        self._without_session = LeastLoadedPolicy(weights, random)

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Order by the numbers that the candidates draw for the session.

        Args:
            request: Its session decides.
            candidates: In any order.
        """
        if not request.session:
            return self._without_session.rank(request, candidates)
        # A client may send a lone surrogate.
        session = request.session.encode("utf-8", "surrogatepass")
        draws = sorted(
            (draw(session, candidate), candidate.replica_id, candidate) for candidate in candidates
        )
        return [
            Ranked(candidate, number, _reason(index))
            for index, (number, _, candidate) in enumerate(draws)
        ]


def draw(session: bytes, candidate: Candidate) -> float:
    """The number that a candidate draws: exponentially distributed, at the rate of its speed.

    Args:
        session: What the client calls its session.
        candidate: Its id and speed matter.
    """
    name = candidate.replica_id.encode()
    digest = blake2b(b"%d:%b%b" % (len(name), name, session), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 1) / 2**64
    return -math.log(uniform) / candidate.speed


def _reason(index: int) -> str:
    return (
        "the replica of this session"
        if index == 0
        else f"{index} after the replica of this session"
    )
