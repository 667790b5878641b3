"""Feeds HTTP without I/O with what nobody would send, under AddressSanitizer and UBSan.

`make fuzz`, or `python -m tests.router.core.http.sanitized --seconds 600`. The first inputs are the
messages of real clients and engines; `fuzz.py` compares what is read with other parsers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.router.core.fuzzing import Fuzzer
from tests.router.core.http.messages import REQUESTS, RESPONSES
from tests.support.native import CORE

HERE = Path(__file__).parent
REQUEST, RESPONSE, CHUNKS, LENGTH = range(4)
"""The lower bits of an input's first byte, as `targets.cpp` reads it."""


def write_corpus(folder: Path) -> None:
    """Write every first input to a file of its own."""
    bodies = [message.partition(b"\r\n\r\n")[2] for message in (*REQUESTS, *RESPONSES)]
    inputs = [
        bytes([target | (stride << 2)]) + message
        for target, messages in (
            (REQUEST, REQUESTS),
            (RESPONSE, RESPONSES),
            (CHUNKS, bodies),
            (LENGTH, bodies[:1]),
        )
        for message in messages
        for stride in (0, 6, 40)
    ]
    for number, content in enumerate(inputs):
        (folder / f"{number:04}").write_bytes(content)


FUZZER = Fuzzer(HERE / "targets.cpp", write_corpus, tuple(sorted((CORE / "http").glob("*.cpp"))))

if __name__ == "__main__":
    sys.exit(FUZZER.main(__doc__, Path("build/fuzz-http")))
