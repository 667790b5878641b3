"""The system's Chromium, headless, driven by Playwright; tests that need it are skipped without
one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.async_api import ConsoleMessage, Page, Request, async_playwright, expect

from tests.support.waiting import DEADLINE_S

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXECUTABLE = next(filter(None, map(shutil.which, _NAMES)), None)

needs_browser = pytest.mark.skipif(
    EXECUTABLE is None,
    reason=f"none of {', '.join(_NAMES)} is installed (Debian: apt-get install chromium)",
)


@dataclass
class Watch:
    """What a page did, apart from what it showed."""

    complaints: list[str] = field(default_factory=list)
    """Script errors, violations of the security policy, error responses."""
    addresses: list[str] = field(default_factory=list)
    """Everything it requested."""

    def of(self, page: Page) -> None:
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _on_request(self, request: Request) -> None:
        self.addresses.append(request.url)


@contextlib.asynccontextmanager
async def browser_page(
    width: int = 1440, height: int = 900, **options: Any
) -> AsyncIterator[tuple[Page, Watch]]:
    """Open an empty page in a new browser. *options* go to Playwright's `new_page`, such as
    `color_scheme`."""
    arguments = (
        ["--no-sandbox"] if os.geteuid() == 0 else []
    )  # Chromium's sandbox refuses to work for root
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=EXECUTABLE, args=arguments)
        try:
            page = await browser.new_page(viewport={"width": width, "height": height}, **options)
            page.set_default_timeout(DEADLINE_S * 1000)
            expect.set_options(timeout=DEADLINE_S * 1000)
            watch = Watch()
            watch.of(page)
            yield page, watch
        finally:
            await browser.close()
