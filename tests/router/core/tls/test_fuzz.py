"""Some seconds of fuzzing under the sanitizers; `make fuzz` runs for as long as one likes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.router.core.tls.sanitized import FUZZER, write_corpus


def test_nothing_that_is_said_breaks_a_session(tmp_path: Path) -> None:
    """Handshakes come from anyone, and whoever is between may change any byte."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_corpus(corpus)
    command = (FUZZER.build(tmp_path), corpus, "5")
    done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    assert done.returncode == 0, done.stderr[:4000]
    runs, given, _found = map(int, re.findall(r"\d+", done.stdout))
    assert runs > given > 20
