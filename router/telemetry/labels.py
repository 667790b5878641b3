"""Labels for kinds, shares, durations and tiers, on the page and in a terminal. They are written
only here; `GET /overview` sends them to everything that shows them.
"""

from __future__ import annotations

import re

KIND_LABELS = {
    "full_attention": "full",
    "sliding_window": "window",
    "chunked_local_attention": "chunked",
    "mamba": "Mamba",
    "not_cached": "not cached",
}
"""Labels by `GroupKind`."""
_FASTEST_TIERS = ("GPU", "CPU")


def group_label(kind: str, reach: int | None = None) -> str:
    """Name a KV cache group: `window 64`.

    Args:
        kind: A value of `GroupKind`; others are shown as they are.
        reach: Tokens of its sliding window or attention chunk.
    """
    word = KIND_LABELS.get(kind, kind.replace("_", " "))
    return f"{word} {reach}" if reach else word


def share(part: int, whole: int) -> str:
    """Part of a whole in percent, never rounded up to all or down to nothing: "100 %" of almost all
    would hide what is wrong.

    Args:
        part: At least 0; more than *whole* is shown as such.
        whole: 0 gives "0 %".
    """
    percent = 100 * part / max(whole, 1)
    if 0 < part < whole:
        return f"{min(max(percent, 0.1), 99.9):.1f} %"
    return f"{percent:.0f} %"


def duration(seconds: float) -> str:
    """Return a time in the one unit that a person would use."""
    for limit, unit_s, word in ((90, 1, "s"), (90 * 60, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{int(max(0.0, seconds) // unit_s)} {word}"
    return f"{int(seconds // 86400)} days"


def tier_order(tier: str) -> tuple[int, str]:
    """A sort key: the fastest tier first; tiers of unknown speed last, by name."""
    is_known = tier in _FASTEST_TIERS
    return (_FASTEST_TIERS.index(tier) if is_known else len(_FASTEST_TIERS), tier)


def natural_order(name: str) -> list[tuple[str, int]]:
    """A sort key that puts `replica-9` before `replica-10`."""
    return [
        (text, int(digits or 0))
        for text, digits in re.findall(r"([^0-9]*)([0-9]{0,18})", name)
        if text or digits
    ]
