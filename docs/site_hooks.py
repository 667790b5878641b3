"""Adds to what MkDocs does: the page of the HTTP API is made from the router's own OpenAPI
document, and links to files beside the documents lead to the repository."""

from __future__ import annotations

import asyncio
import posixpath
import re
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

from router.config.schema import RouterConfig
from router.serve.server import RouterApp
from router.serve.service import RouterService

_BESIDE = re.compile(r"\]\((\.\./[^)#]+)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Turn links to files outside of `docs/` into links to the repository; describe every path of
    the API.

    Args:
        markdown: Of one page.
        page: Which.
        config: The site's.
    """
    if page.file.src_uri == "http-api.md":
        described = markdown.rpartition("\n\n")[0]
        return "\n".join([described, *_sections(asyncio.run(_openapi()))])
    root = f"{config.repo_url}/blob/main/"
    return _BESIDE.sub(lambda found: "](" + root + posixpath.normpath(f"docs/{found[1]}"), markdown)


async def _openapi() -> dict[str, Any]:
    app = RouterApp(RouterService(RouterConfig()))
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        found: dict[str, Any] = (await client.get("/openapi.json")).json()
        return found


def _sections(document: dict[str, Any]) -> Iterator[str]:
    by_tag: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tag = operation["tags"][0]
            by_tag.setdefault(tag, []).append((f"{method.upper()} {path}", operation))
    for tag, operations in by_tag.items():
        yield f"\n## {tag.capitalize()}\n"
        for title, operation in operations:
            yield from _operation(title, operation)


def _operation(title: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"\n### `{title}`\n"
    yield f"{_sentence(operation['summary'])} {operation.get('description', '')}\n"
    yield f"Key: {_keys(operation)}.\n"
    parameters = operation.get("parameters", [])
    if parameters:
        rows = (
            (f"`{found['name']}`", found["in"], found.get("description", ""))
            for found in parameters
        )
        yield _table(("Parameter", "In", "Meaning"), rows)
    answers = ((status, found["description"]) for status, found in operation["responses"].items())
    yield _table(("Status", "Response"), answers)


def _sentence(words: str) -> str:
    return words if words.endswith((".", "?")) else f"{words}."


def _keys(operation: dict[str, Any]) -> str:
    kinds = {name for given in operation.get("security", []) for name in given}
    for kind in ("operator", "client", "metrics"):
        if any(name.startswith(kind) for name in kinds):
            return f"the {kind}'s, where one is configured"
    return "none"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    cells = (" | ".join(cell.replace("\n", " ") for cell in line) for line in lines)
    return "\n".join(f"| {line} |" for line in cells) + "\n"
