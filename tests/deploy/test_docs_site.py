"""The site of the documents, built by MkDocs itself, which refuses broken links."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
import yaml

from router.config.schema import RouterConfig
from router.serve.server import RouterApp
from router.serve.service import RouterService
from tests.deploy.files import ROOT, succeeds, tool


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    succeeds(tool("mkdocs", "none; make docs"), "build", "--quiet", "--site-dir", str(folder))
    return folder


def test_every_document_is_a_page_of_the_site(site: Path) -> None:
    """One that is missing from the navigation is found by nobody."""
    text = (ROOT / "mkdocs.yml").read_text()
    in_navigation = set(re.findall(r": (\S+\.md)$", text, re.MULTILINE))
    assert in_navigation == {path.name for path in (ROOT / "docs").glob("*.md")}
    for name in in_navigation - {"index.md"}:
        assert (site / name.removesuffix(".md") / "index.html").is_file()


async def test_the_page_of_the_http_api_has_every_path(site: Path) -> None:
    """It is made from what a running router says of itself."""
    app = RouterApp(RouterService(RouterConfig()))
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    page = (site / "http-api" / "index.html").read_text()
    assert paths
    assert [path for path in paths if f" {path}</code>" not in page] == []


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    """It is read where there is no network, too."""
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img)[^>]+src="(.*?)"', page.read_text())
        loaded += re.findall(r'<link[^>]+rel="stylesheet"[^>]+href="(.*?)"', page.read_text())
        assert [url for url in loaded if url.startswith(("http", "//"))] == [], page


def test_links_out_of_the_documents_lead_to_the_repository(site: Path) -> None:
    """On the site there are no files beside the documents."""
    page = (site / "concepts" / "index.html").read_text()
    home = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["repo_url"]
    assert f'href="{home}/blob/main/kvevents/hit_rule.py"' in page
