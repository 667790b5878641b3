"""Files that are watched."""

from __future__ import annotations

from pathlib import Path

Stamp = tuple[int, int, int]
"""Of a file's content, without reading it: a change changes one of them. Links are followed, so it
notices a mounted ConfigMap that changes as well."""


def stamp_of(path: Path) -> Stamp | None:
    """When, how large and which file; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
