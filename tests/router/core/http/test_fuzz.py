"""Some seconds of fuzzing under the sanitizers; `make fuzz` runs for as long as one likes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.router.core.http.sanitized import FUZZER, write_corpus


def test_nothing_that_is_sent_breaks_the_reading(tmp_path: Path) -> None:
    """Every byte comes from a socket of anyone's: no byte behind the last may be read, and the
    verdict must not depend on how the network cut them."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_corpus(corpus)
    command = (FUZZER.build(tmp_path), corpus, "5")
    done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    assert done.returncode == 0, done.stderr[:4000]
    runs, given, _found = map(int, re.findall(r"\d+", done.stdout))
    assert runs > given > 100
