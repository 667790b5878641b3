"""Has a replica compute a prompt for another one: the request to it, and how that can fail.

The client waits meanwhile, so nothing is tried twice: where it fails, the replica that responds
computes the prompt itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.config.origin import Header, Timeouts
from router.fleet.client import UpstreamClient
from router.fleet.client_errors import (
    ClosedBeforeResponse,
    ConnectFailed,
    FirstByteTimeout,
    IdleTimeout,
    OutOfResources,
    UpstreamError,
)
from router.plane.attempts import Attempt, Failure, PrefillFailed

_MAX_BYTES = 16 * 1024 * 1024
"""The ids of a million blocks, with room to spare."""
_JSON = (b"content-type", b"application/json")
_FAILURES: tuple[tuple[type[UpstreamError], Failure | None], ...] = (
    (OutOfResources, None),
    (ConnectFailed, Failure.CONNECT),
    (ClosedBeforeResponse, Failure.CLOSED),
    (FirstByteTimeout, Failure.FIRST_BYTE_TIMEOUT),
    (IdleTimeout, Failure.FIRST_BYTE_TIMEOUT),
    (UpstreamError, Failure.MALFORMED),
)
_BY_STATUS = {
    429: Failure.BUSY,
    502: Failure.UNAVAILABLE,
    503: Failure.UNAVAILABLE,
    504: Failure.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class PrefillRequests:
    """Sends prompts to the replicas that compute them for others."""

    upstream: UpstreamClient

    async def send(
        self, attempt: Attempt, target: bytes, headers: tuple[Header, ...], timeouts: Timeouts
    ) -> bytes:
        """Have a prompt computed; return the response. Cancelling the call ends it at the engine.

        Args:
            attempt: The replica, with the body that it gets.
            target: Path and query as on the wire.
            headers: For any replica; those of the attempt replace them.
        Raises:
            PrefillFailed: It was not computed.
        """
        body = attempt.body
        assert body is not None
        fields: dict[bytes, bytes | None] = dict((_JSON, *headers, *attempt.request_headers))
        sent = [(name, value) for name, value in fields.items() if value is not None]
        try:
            status, response = await self.upstream.fetch(
                attempt.origin, target, timeouts, _MAX_BYTES, sent, b"POST", body
            )
        except UpstreamError as error:
            found = next(failure for kind, failure in _FAILURES if isinstance(error, kind))
            raise PrefillFailed(found) from error
        if status == 200:
            return response
        # Where the request is at fault, the replica that responds will say so.
        usual = Failure.SERVER_ERROR if status >= 500 else None
        raise PrefillFailed(_BY_STATUS.get(status, usual))
