"""Defines the errors between an engine and its clients.

    OffloadError
    ├── EngineRequestError       (offload/errors.py) the engine refuses a request
    ├── TokenizerError           a tokenizer or a chat template that cannot be used
    ├── ConversationError        a chat that cannot be written as a prompt
    ├── EngineServerError        an address that cannot be listened on
    ├── EngineDeadError          the engine raised; nothing is served any more
    ├── EngineBusyError          no new requests: too many in flight, or shutting down
    └── ApiError                 an HTTP error response
        ├── InvalidRequest       400
        ├── ModelNotFound        404
        ├── EndpointNotFound     404
        ├── WrongMethod          405
        └── RequestTooLarge      413

Messages of `EngineRequestError`, `ConversationError`, `EngineBusyError`, `EngineDeadError` and
`ApiError` go to clients. They name the field, the value and the rule, and never quote a prompt.
"""

from __future__ import annotations

import msgspec

from offload.errors import OffloadError


class TokenizerError(OffloadError):
    """A file of a tokenizer cannot be used, or does not fit the model."""


class ConversationError(OffloadError):
    """A chat cannot be written as a prompt."""


class EngineServerError(OffloadError):
    """An address cannot be listened on."""


class EngineDeadError(OffloadError):
    """The engine raised in a step and serves nothing any more."""

    def __init__(self) -> None:
        super().__init__("the engine has failed and serves nothing any more; restart it")


class EngineBusyError(OffloadError):
    """No new requests are taken."""


class ApiError(OffloadError):
    """An error response in OpenAI's shape, with vLLM's types and status codes."""

    def __init__(self, message: str, status: int, kind: str, param: str | None = None) -> None:
        """
        Args:
            message: Field, value and rule, without a client's content.
            kind: The error's type, as vLLM names it.
            param: Path of the field at fault, such as `messages[0].role`.
        """
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


class InvalidRequest(ApiError):
    """A field of the body breaks a rule."""

    def __init__(self, param: str, found: str, rule: str) -> None:
        """
        Args:
            found: Its value, or for prompts its type or size.
        """
        super().__init__(f"{param}: {found}; {rule}", 400, "BadRequestError", param)


class ModelNotFound(ApiError):
    """The server has no model of that name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"model: {name[:100]!r} is not served here; GET /v1/models lists what is",
            404,
            "NotFoundError",
            "model",
        )


class EndpointNotFound(ApiError):
    """The server has no such endpoint; the path is not repeated, since it may hold anything."""

    def __init__(self) -> None:
        super().__init__("path: there is no such endpoint", 404, "NotFoundError")


class WrongMethod(ApiError):
    """The endpoint exists, for other methods."""

    def __init__(self) -> None:
        super().__init__("method: this endpoint takes another method", 405, "MethodNotAllowedError")


class RequestTooLarge(ApiError):
    """A body over the limit."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"body: longer than the limit of {limit_bytes} bytes", 413, "RequestTooLargeError"
        )


class EngineErrorDetails(msgspec.Struct, frozen=True):
    """An error as vLLM reports it."""

    message: str
    """Field, value and rule."""
    type: str
    code: int
    """The HTTP status."""
    param: str | None = None
    """Path of the field at fault."""


class EngineErrorBody(msgspec.Struct, frozen=True):
    """Body of an error response, and the event by which a stream that has begun reports one."""

    error: EngineErrorDetails
