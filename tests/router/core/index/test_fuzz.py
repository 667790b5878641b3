"""Some seconds of fuzzing; `make fuzz` runs for as long as one likes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.router.core.index.fuzz import FUZZER, write_corpus

SECONDS = "10"


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FUZZER.build(tmp_path_factory.mktemp("fuzzer"))


def run(fuzzer: Path, corpus: Path, seconds: str = SECONDS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (fuzzer, corpus, seconds), capture_output=True, text=True, check=False, errors="replace"
    )


def test_nothing_that_is_sent_breaks_the_index(fuzzer: Path, tmp_path: Path) -> None:
    """Every byte that comes from a socket may be anyone's; the sanitizers see each wrong access,
    and the whole index is audited after every step."""
    write_corpus(tmp_path)
    done = run(fuzzer, tmp_path)
    assert done.returncode == 0, done.stderr[:4000]
    runs, given, found = map(int, re.findall(r"\d+", done.stdout))
    assert runs > given > 300
    assert found > 0, "the coverage is not followed"
