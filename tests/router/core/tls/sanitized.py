"""Feeds sessions of TLS with what nobody would send, under AddressSanitizer and UBSan.

`make fuzz`, or `python -m tests.router.core.tls.sanitized --seconds 600`. The library itself is as
it was installed; what is watched is what our side does with it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.router.core.fuzzing import Fuzzer
from tests.router.core.plane.harness import Authority
from tests.router.core.tls.clients import hello
from tests.support.native import CORE

HERE = Path(__file__).parent
RAW = 1
"""The lowest bit of an input's first byte, as `targets.cpp` reads it."""


def write_corpus(folder: Path) -> None:
    """Write every first input to a file of its own, and the certificates beside the folder."""
    authority = Authority(folder.parent)
    authority.issued()
    os.environ["KVROUTE_FUZZ_CERTIFICATES"] = str(folder.parent)
    said = [
        *(hello(authority.client_context()), hello(authority.client_context())[:100]),
        *(b"GET / HTTP/1.1\r\n\r\n", b"\x15\x03\x03\x00\x02\x02\x28"),
    ]
    # A change after some bytes, and another.
    changes = [bytes(14)] + [bytes((far >> 8, far & 255, 1)) for far in range(0, 6000, 300)]
    inputs = [bytes([stride | RAW]) + each for each in said for stride in (0, 2, 128)]
    inputs += [bytes([stride]) + each for each in changes for stride in (2, 64)]
    for number, content in enumerate(inputs):
        (folder / f"{number:04}").write_bytes(content)


FUZZER = Fuzzer(HERE / "targets.cpp", write_corpus, tuple(sorted((CORE / "tls").glob("*.cpp"))))

if __name__ == "__main__":
    sys.exit(FUZZER.main(__doc__, Path("build/fuzz-tls")))
