"""What can go wrong around an engine, on its way to a client.

    OffloadError
    ├── EngineRequestError    (offload/errors.py) the engine refuses a request; its message is for the client
    ├── TokenizerError        a tokenizer or a chat template that cannot be used
    ├── ConversationError     a chat that cannot be written as a prompt; its message is for the client
    ├── EngineServerError     an address that cannot be served on
    ├── EngineDeadError       the engine raised: nothing is served any more
    ├── EngineBusyError       nothing new is taken: too much is under way, or the engine is going down
    └── ApiError              a request is answered with an error: status, place, rule
        ├── InvalidRequest        400
        ├── ModelNotFound      404
        ├── EndpointNotFound       404
        ├── WrongMethod  405
        └── RequestTooLarge      413

Messages name place, value and rule; no prompt is ever in one.
"""

from __future__ import annotations

from typing import Any

from offload.errors import OffloadError


class TokenizerError(OffloadError):
    """A file of a tokenizer cannot be used, or does not fit the model."""


class ConversationError(OffloadError):
    """A chat cannot be written as a prompt."""


class EngineServerError(OffloadError):
    """An address cannot be listened on."""


class EngineDeadError(OffloadError):
    """The engine raised in a step, and serves nothing any more."""

    def __init__(self) -> None:
        super().__init__("the engine has failed and serves nothing any more; restart it")


class EngineBusyError(OffloadError):
    """Nothing new is taken."""


class ApiError(OffloadError):
    """A request is answered with an error, in OpenAI's shape with vLLM's types and status codes.

    Args:
        message: Place, value and rule, without content.
        status: Of the answer.
        kind: What vLLM calls such an error.
        place: The field at fault.
    """

    def __init__(self, message: str, status: int, kind: str, place: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.place = place


class InvalidRequest(ApiError):
    """The input breaks a rule.

    Args:
        place: Path of the value in the body.
        found: What is there: the value itself where it is no prompt, else its type or size.
        rule: What would have been right.
    """

    def __init__(self, place: str, found: str, rule: str) -> None:
        super().__init__(f"{place}: {found}; {rule}", 400, "BadRequestError", place)


class ModelNotFound(ApiError):
    """This server has no model of that name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"model: {name[:100]!r} is not served here; GET /v1/models lists what is",
            404,
            "NotFoundError",
            "model",
        )


class EndpointNotFound(ApiError):
    """No endpoint of that path; it is not repeated, since nobody knows what a client puts there."""

    def __init__(self) -> None:
        super().__init__("path: there is no such endpoint", 404, "NotFoundError")


class WrongMethod(ApiError):
    """The endpoint exists, for other methods."""

    def __init__(self) -> None:
        super().__init__("method: this endpoint takes another one", 405, "MethodNotAllowedError")


class RequestTooLarge(ApiError):
    """A body over the bound."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"body: longer than the limit of {limit_bytes} bytes", 413, "RequestTooLargeError"
        )


def error_body(message: str, kind: str, status: int, place: str | None = None) -> dict[str, Any]:
    """An error as clients are told it."""
    return {"error": {"message": message, "type": kind, "param": place, "code": status}}
