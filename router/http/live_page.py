"""The live page: the files of `static/`, and the headers that restrict a browser to them.

The page is served by this process only, so it works where no other server can be reached. It needs
no key, since it holds no data: it fetches everything from endpoints that do need one.
"""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

from fastapi import FastAPI, Response

from router.errors import UnknownPath
from router.http.openapi import described, sends_text

HEADERS = {
    # Names of models and replicas come from outside. The page shows them as text. Should one ever
    # be taken for HTML all the same, the browser refuses to parse it (trusted types), to run any
    # script in it and to load anything from it.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # A router of another version has its own page.
    "cache-control": "no-cache",
}

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class _PageFile(NamedTuple):
    content_type: str
    body: bytes

    def response(self) -> Response:
        return Response(self.body, headers={**HEADERS, "content-type": self.content_type})


def add_page(app: FastAPI) -> None:
    """Serve the page at `/` and its files under `/static/`."""
    # Read once, so that no path a client names ever reaches the file system.
    page = _load()
    html = {200: sends_text("The page.", _TYPES["html"])}

    @app.get("/", **described("operation", "The live page", html))
    async def live_page() -> Response:
        return page["index.html"].response()

    @app.get("/static/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in page:
            raise UnknownPath
        return page[name].response()


def _load() -> dict[str, _PageFile]:
    """The files of the page by name."""
    found = [
        file
        for file in files("router").joinpath("static").iterdir()
        if _suffix(file.name) in _TYPES
    ]
    return {file.name: _PageFile(_TYPES[_suffix(file.name)], file.read_bytes()) for file in found}


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]
