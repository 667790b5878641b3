"""Files that are watched."""

from __future__ import annotations

from pathlib import Path

Stamp = tuple[int, int, int]
"""Stands for a file's content without reading it: a change changes one of the numbers. Links are
followed, so a mounted ConfigMap that changes is noticed as well."""


def stamp_of(path: Path) -> Stamp | None:
    """Time, size and identity of a file; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
