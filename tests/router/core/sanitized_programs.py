"""Programs in C++ that are run under a sanitizer."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pytest

from tests.support.native import compiled, compiled_once


def said(folder: Path, sanitizer: str, driver: Path, of_core: Sequence[Path]) -> str:
    """What a program prints, which must not fail. Skips where it cannot run.

    Args:
        folder: For what is built.
        sanitizer: As `-fsanitize` names it.
        driver: The program.
        of_core: What it runs of the core. Sorted by room.
    """
    options = ("-O1", "-g1", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    rooms = [list(files) for _, files in groupby(of_core, lambda path: path.parent)]
    objects = [compiled_once(files, *options) for files in rooms]
    program = compiled(folder / "program", *options, str(driver), *map(str, objects))
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer cannot run here: the kernel spreads memory too far")
    assert done.returncode == 0, done.stderr[:4000]
    return done.stdout
