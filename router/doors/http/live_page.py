"""The live page and the API's description: the files of `static/`, and the headers that restrict a
browser to them.

The pages are served by this process only, so they work where no other server can be reached. They
need no key, since they hold no data: they fetch everything from endpoints that do need one. A key
that was entered lies in the browser's storage for this origin, where every script of this origin
can read it: so none but these files runs here, and Swagger UI is among them (5.35.0 of npm's
`swagger-ui-dist`, unchanged but for the references to source maps).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import NamedTuple

from fastapi import FastAPI, Response

from router.doors.http.openapi import described, sends_text
from router.errors import UnknownPath

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

# Swagger UI has icons inside its style sheet, and builds HTML from descriptions, with a sanitiser
# in front: so images may be inline, and trusted types are not required.
DOCS_HEADERS = {
    **HEADERS,
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
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

    def response(self, headers: Mapping[str, str] = HEADERS) -> Response:
        return Response(self.body, headers={**headers, "content-type": self.content_type})


def add_page(app: FastAPI) -> None:
    """Serve the page at `/`, the API's description at `/docs`, and their files under `/static/`."""
    # Read once, so that no path a client names ever reaches the file system.
    page = _load()
    html = {200: sends_text("The page.", _TYPES["html"])}

    @app.get("/", **described("operation", "The live page", html))
    async def live_page() -> Response:
        return page["index.html"].response()

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return page["docs.html"].response(DOCS_HEADERS)

    @app.get("/static/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in page:
            raise UnknownPath
        return page[name].response()


def _load() -> dict[str, _PageFile]:
    folder = files("router").joinpath("static")
    found = [
        file
        for file in (*folder.iterdir(), *folder.joinpath("swagger-ui").iterdir())
        if _suffix(file.name) in _TYPES
    ]
    return {file.name: _PageFile(_TYPES[_suffix(file.name)], file.read_bytes()) for file in found}


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]
