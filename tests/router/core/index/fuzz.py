"""Feeds the compiled index with what nobody would send, under AddressSanitizer and UBSan.

`make fuzz`, or `python -m tests.router.core.index.fuzz --seconds 600`. With clang libFuzzer does
it; with g++ a small driver of ours does, which also follows the coverage. The first inputs are made
of recorded streams and wire samples. An input that ends the process is kept.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from router.recordings import RecordingReader
from tests.support.native import CORE, compiled, compiler
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


def build(folder: Path) -> Path:
    """The fuzzer, for g++: the code under test with sanitizers and coverage, the driver without
    the latter."""
    code = compiled(
        folder / "targets.o",
        *("-O1", "-g1", "-c", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        *("-fsanitize-coverage=trace-pc", str(HERE / "targets.cpp")),
    )
    return compiled(
        folder / "fuzzer",
        *("-O1", "-fsanitize=address,undefined", str(HERE / "driver.cpp"), str(code)),
    )


def build_with_clang(folder: Path, clang: str) -> Path:
    """The fuzzer, with libFuzzer as its driver.

    Args:
        folder: Where it goes.
        clang: The compiler.
    """
    fuzzer = folder / "fuzzer"
    sanitizers = "-fsanitize=fuzzer,address,undefined"
    flags = ("-std=c++20", "-O1", "-g", sanitizers, f"-I{CORE}")
    command = (clang, *flags, str(HERE / "targets.cpp"), "-o", str(fuzzer))
    subprocess.run(command, check=True)
    return fuzzer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="kept for later")
    arguments = parser.parse_args()
    corpus: Path = arguments.folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    write_corpus(corpus)
    seconds, seed = str(arguments.seconds), str(arguments.seed)
    clang = shutil.which("clang++")
    if clang:
        fuzzer = build_with_clang(arguments.folder, clang)
        options = (f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=65536", "-timeout=20")
        return subprocess.run((fuzzer, *options, corpus), check=False).returncode
    if compiler() is None:
        sys.exit("make fuzz needs clang++ or g++")
    return subprocess.run((build(arguments.folder), corpus, seconds, seed), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
