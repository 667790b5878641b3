"""The live page: the files of `static/`, and the headers that bind a browser to them.

The page comes from this process alone, so it works where no other server can be reached. It needs
no key, since it holds nothing; what it shows it asks of endpoints that do.
"""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

from fastapi import FastAPI, Response

from router.errors import UnknownPath

HEADERS = {
    # Names of models and replicas come from elsewhere. They are put into the page as text; and were
    # one ever taken for HTML, the browser would neither run nor load anything of it, and refuse to
    # parse it in the first place (trusted types).
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # A router of another version brings its own page.
    "cache-control": "no-cache",
}

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class _File(NamedTuple):
    content_type: str
    body: bytes

    def answer(self) -> Response:
        return Response(self.body, headers={**HEADERS, "content-type": self.content_type})


def add_page(app: FastAPI) -> None:
    """The page at `/`, its files under `/static/`."""
    # Read once, so that no path a client names ever reaches the file system.
    page = _load()

    @app.get("/", tags=["operation"], summary="The live page")
    async def index() -> Response:
        return page["index.html"].answer()

    @app.get("/static/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in page:
            raise UnknownPath
        return page[name].answer()


def _load() -> dict[str, _File]:
    """All files of the page by name."""
    found = [
        file
        for file in files("router").joinpath("static").iterdir()
        if _suffix(file.name) in _TYPES
    ]
    return {file.name: _File(_TYPES[_suffix(file.name)], file.read_bytes()) for file in found}


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]
