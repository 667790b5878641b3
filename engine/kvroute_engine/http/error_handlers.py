"""Errors as HTTP responses in OpenAI's shape, with vLLM's types and status codes."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from kvroute_engine.http.clients import RequestAbandoned
from kvroute_engine.http.errors import (
    ApiError,
    ConversationError,
    EndpointNotFound,
    EngineBusyError,
    EngineDeadError,
    EngineErrorBody,
    EngineErrorDetails,
    WrongMethod,
)
from offload.errors import EngineRequestError

_CLIENT_CLOSED_REQUEST = 499


def json_response(value: object, status: int = 200) -> Response:
    """Build a JSON response.

    Args:
        value: Anything that msgspec can encode.
    """
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _error_response(message: str, kind: str, status: int, param: str | None = None) -> Response:
    return json_response(EngineErrorBody(EngineErrorDetails(message, kind, status, param)), status)


def add_error_handlers(app: FastAPI) -> None:
    """Give each kind of error its response."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(EngineRequestError, _on_refused)
    app.add_exception_handler(ConversationError, _on_refused)
    app.add_exception_handler(EngineBusyError, _on_busy)
    app.add_exception_handler(EngineDeadError, _on_dead)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestAbandoned, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected_error)


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(str(error), error.kind, error.status, error.param)


async def _on_refused(_request: Request, error: Exception) -> Response:
    return _error_response(str(error), "BadRequestError", 400)


async def _on_busy(_request: Request, error: Exception) -> Response:
    response = _error_response(str(error), "ServiceUnavailableError", 503)
    response.headers["retry-after"] = "1"
    return response


async def _on_dead(_request: Request, error: Exception) -> Response:
    return _error_response(str(error), "InternalServerError", 500)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _on_api_error(
        request, WrongMethod() if error.status_code == 405 else EndpointNotFound()
    )


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _on_unexpected_error(_request: Request, _error: Exception) -> Response:
    """A bug of this server; uvicorn logs it, and the client gets no details."""
    return _error_response("the server has made a mistake", "InternalServerError", 500)
