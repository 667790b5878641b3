"""The colours of the live page, in both schemes."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

STYLES = Path(__file__).parents[4] / "router/static/page.css"
LEAST_CONTRAST = 4.5
"""Of text below 24 px, by WCAG 2.2, AA."""


def schemes() -> list[dict[str, str]]:
    """The colours by name: dark, then light over it."""
    blocks = re.findall(r":root \{(.*?)\}", STYLES.read_text(), re.DOTALL)
    dark, light = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", each)) for each in blocks)
    return [dark, {**dark, **light}]


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", schemes(), ids=["dark", "light"])
def test_every_text_is_read_on_every_ground(scheme: dict[str, str]) -> None:
    """Links, which have the colour of the first tier, were too pale in the light scheme."""
    texts = ("text", "muted", "good", "warn", "bad", "tier-0")
    grounds = ("page", "panel", "raised", "warn-back", "bad-back")
    pale = {
        (text, ground): found
        for text, ground in product(texts, grounds)
        if (found := contrast(scheme[text], scheme[ground])) < LEAST_CONTRAST
    }
    assert pale == {}
