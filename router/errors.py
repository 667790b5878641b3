"""Defines what can go wrong in the router.

    RouterError
    ├── ConfigError             the configuration: every problem found, each with its path
    ├── PolicyError             a policy is unknown, cannot be made, or broke a rule
    ├── InvalidReplicaResponse  a replica's report about itself makes no sense
    └── RequestError            the response to a client's or an operator's request is an error

Those that become a response stand in the order of their statuses, and last those after which a
client should try again (429, 503). Clients get the message, with status, type and code; the first
sentence of each docstring stands in `/docs`.

`router.prompt.errors` and `router.fleet.client_errors` have trees of their own. Messages name
place, value and rule; no prompt, token or key is ever in one.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple


class ConfigProblem(NamedTuple):
    """One thing wrong with the configuration."""

    place: str
    """Path of the value: `replicas[1].url`; empty for the whole configuration."""
    text: str
    """The value, unless it is a secret, and the rule it breaks."""

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.place else self.text


class RouterError(Exception):
    """Root of everything the router raises on purpose."""


class ConfigError(RouterError):
    """The configuration cannot be used."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__("\n  ".join([f"{head} in the configuration:", *map(str, self.problems)]))


class PolicyError(RouterError):
    """A routing policy is unknown, cannot be made, or returned something other than a ranking."""


class InvalidReplicaResponse(RouterError):
    """A replica's report on itself, its models or its event sources, makes no sense.

    Args:
        place: Path of the value in the response.
        text: The value, and the rule it breaks.
    """

    def __init__(self, place: str, text: str) -> None:
        super().__init__(f"{place}: {text}")


class RequestError(RouterError):
    """The base of errors that become a response; subclasses set status, type and code."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    text: ClassVar[str] = "the router failed to serve this request; the reason is in its log"
    """The message, where it is always the same."""
    retry_after_s: int | None = None
    """Seconds after which it makes sense to try again, for the `Retry-After` header."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(self.text if message is None else message)

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """Return headers that belong to the response, names in lower case."""
        return () if self.retry_after_s is None else ((b"retry-after", b"%d" % self.retry_after_s),)


class _NotAllowed(RequestError):
    status = 403
    type = "permission_error"


class _NotFound(RequestError):
    status = 404
    type = "invalid_request_error"


class _Conflict(RequestError):
    status = 409
    type = "invalid_request_error"


class BadRequest(RequestError):
    """The input breaks a rule.

    Args:
        place: Path of the value in the body, or the header's name.
        found: The value; its type and size instead where it is a secret or part of a prompt.
    """

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"

    def __init__(self, place: str, found: str, rule: str) -> None:
        super().__init__(f"{place}: {found}; {rule}")
        self.place = place
        self.found = found
        self.rule = rule

    def __reduce__(self) -> tuple[Any, ...]:
        return BadRequest, (self.place, self.found, self.rule)


class PromptTooLong(BadRequest):
    """A prompt is longer than any replica of its model takes.

    Args:
        longest: The most that a replica takes, prompt and response together.
    """

    code = "context_length_exceeded"

    def __init__(self, tokens: int, longest: int) -> None:
        super().__init__(
            "prompt", f"{tokens:,} tokens", f"this model takes at most {longest:,} at any replica"
        )


class Unauthorized(RequestError):
    """The API key is missing or wrong; the message does not reveal which."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"

    def __init__(self, was_given: bool = False) -> None:
        self.was_given = was_given
        """True if there was a key, a wrong one."""
        super().__init__(
            "authorization: the API key is missing or wrong; "
            "send it as 'Authorization: Bearer <key>'"
        )

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return ((b"www-authenticate", b"Bearer"),)


class ForeignHost(_NotAllowed):
    """The request has no key, and its `Host` names another machine."""

    code = "foreign_host"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"host: {_shown(name)} is not known to be this router; use its address, or add the "
            "name to server.host_names"
        )


class ForeignOrigin(_NotAllowed):
    """A page on another origin wants to change something."""

    code = "foreign_origin"
    text = "origin: pages of other origins may not change this router"


class LoopbackOnly(_NotAllowed):
    """No operator key is set, so only the router's own machine may operate it."""

    code = "loopback_only"
    text = (
        "client address: no operator key is set, so only the router's own machine may ask "
        "this; set server.operator_api_key"
    )


class CaptureDisabled(_NotAllowed):
    """Prompts may be recorded only where the configuration allows it."""

    code = "capture_disabled"
    text = (
        "recording: prompts are not recorded unless observability.allow_capture is on; "
        "kvroute serve --allow-capture"
    )


class ModelNotAllowed(_NotAllowed):
    """The key is not for this model."""

    code = "model_not_allowed"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"model: this key is not for {_shown(model)}; GET /v1/models lists those it is for"
        )


class UnknownModel(_NotFound):
    """No replica serves a model of that name."""

    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"model: no replica serves {_shown(model)}; GET /v1/models lists the models"
        )


class UnknownReplica(_NotFound):
    """No replica has that id."""

    code = "replica_not_found"

    def __init__(self, replica_id: str) -> None:
        super().__init__(
            f"replica: no replica has the id {_shown(replica_id)}; GET /replicas lists them"
        )


class UnknownResponse(_NotFound):
    """No stored response of that id was made with the key that asks for it."""

    code = "response_not_found"
    text = "response id: no stored response of that id was made with this key"


class UnknownReservation(_NotFound):
    """No reservation or selection of that id was made with the key that asks for it, or it is over.

    Args:
        what: `reservation` or `selection_id`.
    """

    code = "reservation_not_found"

    def __init__(self, what: str = "reservation") -> None:
        super().__init__(f"{what}: unknown id; it ended, or its time was over")


class UnknownPath(_NotFound):
    """No endpoint has that path. The message does not repeat it: clients may put anything there."""

    code = "path_not_found"
    text = "path: no such endpoint; GET /docs lists them"


class MethodNotAllowed(RequestError):
    """An endpoint exists, but for other methods."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, allowed: str) -> None:
        super().__init__(f"method: this endpoint takes {allowed} only")
        self.allowed = allowed

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return ((b"allow", self.allowed.encode()),)


class ReplicaExists(_Conflict):
    """A replica cannot be added: its id or its URL belongs to another one.

    Args:
        place: `id` or `url`.
    """

    code = "replica_exists"

    def __init__(self, place: str, value: str, replica_id: str) -> None:
        super().__init__(
            f"{place}: {_shown(value)} belongs to the replica {_shown(replica_id)} already; "
            "remove that one first"
        )


class ReservationExists(_Conflict):
    """A reservation of that id has not ended yet."""

    code = "reservation_exists"
    text = "selection_id: a reservation of that id has not ended; end it, or leave the id out"


class NotRecordable(_Conflict):
    """A cache cannot be recorded now."""

    code = "not_recordable"

    def __init__(self, why: str) -> None:
        super().__init__(f"recording: {why}")


class NoSnapshot(_Conflict):
    """Another router asks for a snapshot, and no usable one exists."""

    code = "no_snapshot"

    def __init__(self, why: str) -> None:
        super().__init__(f"snapshot: {why}")


class BodyTooLarge(RequestError):
    """A request body over the bound."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"body: longer than the limit of {limit_bytes} bytes")


class NotJson(RequestError):
    """The request changes something and is not sent as JSON, which a foreign page cannot do
    unasked."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"
    text = "content-type: must be application/json, with or without a body"


class _NotNow(RequestError):
    status = 503
    type = "server_error"

    def __init__(self, message: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(_NotNow):
    """A bound of the router itself is reached."""

    code = "overloaded"

    def __init__(self, why: str) -> None:
        super().__init__(f"the router {why}; try again")


class NoReplica(_NotNow):
    """Replicas serve the model, but none can take a request now.

    Args:
        why: The reasons, counted; without a client's data.
    """

    code = "no_replica"

    def __init__(self, model: str, why: str, retry_after_s: int = 1) -> None:
        super().__init__(
            f"no replica can serve {_shown(model)} now: {why}; try again", retry_after_s
        )


class KeyLimitReached(_NotNow):
    """The holder of the key has reached a limit."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, limit: str, retry_after_s: int) -> None:
        super().__init__(
            f"api key: at its limit of {limit}; try again in {retry_after_s} s", retry_after_s
        )


class EnginesBusy(_NotNow):
    """A replica has refused the request since there are too many, and no other can take it now."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, model: str, retry_after_s: int) -> None:
        super().__init__(
            f"the replicas of {_shown(model)} have too many requests; try again in "
            f"{retry_after_s} s",
            retry_after_s,
        )


class QueueFull(_NotNow):
    """The model's queue is full. The tenant with most waiting is refused first."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, model: str, waiting: int, retry_after_s: int) -> None:
        super().__init__(
            f"every replica of {_shown(model)} is at its limit and {waiting} requests wait, as "
            f"many as may; try again in {retry_after_s} s",
            retry_after_s,
        )


class QueueTimeout(_NotNow):
    """No replica has room for the request before its deadline."""

    code = "queue_timeout"

    def __init__(self, model: str, waiting: int, retry_after_s: int) -> None:
        super().__init__(
            f"no replica of {_shown(model)} has room for this request before its deadline, and "
            f"{waiting} others wait; try again in {retry_after_s} s",
            retry_after_s,
        )


class ShuttingDown(_NotNow):
    """The router finishes what it has and takes nothing new."""

    code = "shutting_down"
    text = "the router is shutting down; try again"

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        # On a new connection the client may reach a router that stays.
        return (*super().headers(), (b"connection", b"close"))


def _shown(text: str) -> str:
    """Return a name from outside, quoted and cut to a bounded length."""
    return repr(text if len(text) <= 100 else text[:97] + "...")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the system had no memory for it: Python raises it in three forms."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and "can't start new thread" in str(error))
    )
