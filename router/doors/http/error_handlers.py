"""Errors of the router's own endpoints as responses."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from router.doors.http.access_log import note_refused
from router.doors.http.bodies import JSON, ClientLeft
from router.doors.proxied_paths import ProxiedPaths, dialect_of
from router.errors import MethodNotAllowed, RequestError, UnknownPath, is_out_of_memory
from router.plane.proxied_messages import error_body
from router.telemetry.request_observer import RequestObservers


def add_error_handlers(app: FastAPI, paths: ProxiedPaths, observers: RequestObservers) -> None:
    """Give every error the one form, and count it."""

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        note_refused(request.scope, error.code)
        observers.refused(error)
        headers = {name.decode(): value.decode() for name, value in error.headers()}
        body = error_body(dialect_of(request.url.path), str(error), error.type, error.code)
        return Response(body, error.status, headers, JSON)

    async def refuse_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        allowed = _allowed_methods(app, paths, request.scope)
        if not allowed:
            return await refuse(request, UnknownPath())
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"allow": allowed})
        return await refuse(request, MethodNotAllowed(allowed))

    async def count_gone(_request: Request, _error: Exception) -> Response:
        observers.client_left()
        return Response(status_code=400)

    async def refuse_for_memory(request: Request, error: Exception) -> Response:
        if not is_out_of_memory(error):
            raise error
        return await refuse(request, observers.out_of_memory())

    async def fail(request: Request, _error: Exception) -> Response:
        return await refuse(request, RequestError())  # the ASGI server logs it

    app.add_exception_handler(Exception, fail)
    for kind in (MemoryError, OSError, RuntimeError):
        app.add_exception_handler(kind, refuse_for_memory)
    app.add_exception_handler(RequestError, refuse)
    app.add_exception_handler(HTTPException, refuse_path)
    app.add_exception_handler(ClientLeft, count_gone)


def _allowed_methods(app: FastAPI, proxied: ProxiedPaths, scope: Scope) -> str:
    """The methods of a path, for the `Allow` header; empty for an unknown path."""
    found: set[str] = set()
    for route in app.router.routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            found |= route.methods or set()
    path = proxied.find(scope["path"])
    found.update(() if path is None else path.methods)
    if not found:
        return ""
    found |= {"OPTIONS", "HEAD"} if "GET" in found else {"OPTIONS"}
    return ", ".join(sorted(found))
