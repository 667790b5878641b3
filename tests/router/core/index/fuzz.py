"""Feeds the compiled index with what nobody would send, under AddressSanitizer and UBSan.

`make fuzz`, or `python -m tests.router.core.index.fuzz --seconds 600`. The first inputs are made of
recorded streams and wire samples.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from router.cli.recordings import RecordingReader
from tests.router.core.fuzzing import Fuzzer
from tests.support.native import CORE
from tests.support.wire_samples import live, versions

HERE = Path(__file__).parent
STREAMS = HERE.parents[2] / "conformance" / "streams"
PAYLOAD, JSON, STATE, PROGRAM, TABLE, RUN = (bytes([target]) for target in range(6))
"""The first byte of an input, as `targets.cpp` reads it."""
LARGEST = 4096


def first_inputs(programs: int = 64) -> Iterator[bytes]:
    """Inputs that the code knows, and some that say nothing.

    Args:
        programs: How many random programs.
    """
    for path in sorted(STREAMS.glob("*.gz")):
        with RecordingReader(path) as reader:
            frames = (record for record in reader if isinstance(record, bytes))
            yield from map(as_payload, islice(small(frames), 0, 40, 8))
    for version in versions():
        samples = (message.payload for message in live(version))
        yield from map(as_payload, islice(small(samples), 0, 20, 5))
    for text in (b"[]", b"[1, 2,3 ]", b"[4294967295]", b"[0,00]", b"[1", b'["1"]', b"[-1]"):
        yield JSON + text
    yield JSON + b"[" + b",".join(b"%d" % number for number in range(300)) + b"]"
    for size in (0, 17, 130, 240, 300):
        head, long = b"\1\2kv\1\x08", b"\2" + size.to_bytes(8, "big")
        short = b"" if size > 255 else bytes((0, size))
        messages = [
            head + bytes((*bytes(7), seq)) + (short or long) + bytes(size) for seq in (0, 1)
        ]
        yield RUN + bytes((6, *head, 0, 0, 0)) + b"".join(messages)
    random = Random(1)
    for target in (STATE, *[TABLE] * 4, *[PROGRAM] * programs):
        yield target + random.randbytes(random.choice((64, 256, 1024)))


def small(payloads: Iterator[bytes]) -> Iterator[bytes]:
    return (payload for payload in payloads if len(payload) <= LARGEST)


def as_payload(payload: bytes) -> bytes:
    """Small bounds, not canonical."""
    return PAYLOAD + b"\0\0" + payload


def write_corpus(folder: Path) -> None:
    """Write every first input to a file of its own."""
    for number, content in enumerate(first_inputs()):
        (folder / f"{number:04}").write_bytes(content)


FUZZER = Fuzzer(HERE / "targets.cpp", write_corpus, tuple(sorted((CORE / "index").glob("*.cpp"))))

if __name__ == "__main__":
    sys.exit(FUZZER.main(__doc__, Path("build/fuzz")))
