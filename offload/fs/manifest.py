"""Records which layout and model a directory's blocks belong to, which their names do not show.

A directory of another layout or model is refused, unless its owner asks for its blocks to be
deleted; one that holds foreign files is always refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import CacheConfigError

MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """The properties that all blocks of a directory share."""

    payload_bytes: Sequence[int]
    """Per group, the bytes of an offloaded block."""
    identity: str
    """All else that makes equal keys mean equal bytes: model and revision, cache dtype, hash seed,
    rank. Compared verbatim."""
    gpu_blocks: Sequence[int] = ()
    """Per group, how many GPU blocks a block covers, where their hashes are kept."""

    def __post_init__(self) -> None:
        if not self.payload_bytes or min(self.payload_bytes) < 1:
            raise CacheConfigError(
                f"disk tier: payload_bytes {list(self.payload_bytes)} must be one positive number "
                "for each group"
            )

    def encode(self) -> bytes:
        """The contents of the manifest's file."""
        document: dict[str, object] = {
            "format": _FORMAT,
            "identity": self.identity,
            "payload_bytes": list(self.payload_bytes),
        }
        if max(self.gpu_blocks, default=1) > 1:
            document["gpu_blocks"] = list(self.gpu_blocks)
        return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"


def read_manifest(root: Path) -> bytes | None:
    """The contents of a directory's manifest; None if it has none."""
    try:
        return (root / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write a directory's manifest, atomically and durably.

    Args:
        manifest: Replaces the one it has.
    """
    temporary = root / f"{MANIFEST}.tmp"
    with temporary.open("wb") as file:
        file.write(manifest.encode())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(root / MANIFEST)
