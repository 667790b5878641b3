"""Every error as clients are told it: OpenAI's shape, vLLM's types and status codes."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from offload.engine.http.clients import ClientGone
from offload.engine.http.errors import (
    ApiError,
    ConversationError,
    EngineBusyError,
    EngineDeadError,
    MethodNotAllowed,
    UnknownPath,
    error_answer,
)
from offload.errors import EngineRequestError

_CLIENT_CLOSED_REQUEST = 499


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def add_error_answers(app: FastAPI) -> None:
    """Answer each kind of error in its way."""
    app.add_exception_handler(ApiError, _answer_api)
    app.add_exception_handler(EngineRequestError, _answer_refused)
    app.add_exception_handler(ConversationError, _answer_refused)
    app.add_exception_handler(EngineBusyError, _answer_busy)
    app.add_exception_handler(EngineDeadError, _answer_dead)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(ClientGone, _answer_nobody)
    app.add_exception_handler(Exception, _answer_fault)


async def _answer_api(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return json_response(
        error_answer(str(error), error.kind, error.status, error.place), error.status
    )


async def _answer_refused(_request: Request, error: Exception) -> Response:
    return json_response(error_answer(str(error), "BadRequestError", 400), 400)


async def _answer_busy(_request: Request, error: Exception) -> Response:
    answer = json_response(error_answer(str(error), "ServiceUnavailableError", 503), 503)
    answer.headers["retry-after"] = "1"
    return answer


async def _answer_dead(_request: Request, error: Exception) -> Response:
    return json_response(error_answer(str(error), "InternalServerError", 500), 500)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _answer_api(
        request, MethodNotAllowed() if error.status_code == 405 else UnknownPath()
    )


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _answer_fault(_request: Request, _error: Exception) -> Response:
    """A mistake of this server's own, which is logged by uvicorn and not told."""
    return json_response(
        error_answer("the server has made a mistake", "InternalServerError", 500), 500
    )
