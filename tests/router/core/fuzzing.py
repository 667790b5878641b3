"""Builds and runs fuzzers of the core: a file of targets, under AddressSanitizer and UBSan.

With clang libFuzzer feeds them; with g++ `driver.cpp` does, which also follows the coverage. An
input that ends the process is kept.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.native import CORE, compiled, compiled_once, compiler

DRIVER = Path(__file__).parent / "driver.cpp"


@dataclass(frozen=True, slots=True)
class Fuzzer:
    """What is fed, and with what it begins."""

    targets: Path
    """Defines `LLVMFuzzerTestOneInput`."""
    write_corpus: Callable[[Path], None]
    """Writes every first input to a file of its own."""
    sources: tuple[Path, ...]
    """Of one room of the core."""

    def build(self, folder: Path) -> Path:
        """The fuzzer, for g++: the code under test with sanitizers and coverage, the driver without
        the latter."""
        sanitized = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
        covered = (*sanitized, "-fsanitize-coverage=trace-pc")
        code = compiled_once(self.sources, *covered)
        targets = compiled(folder / "targets.o", *covered, "-c", str(self.targets))
        return compiled(
            folder / "fuzzer",
            *("-O1", "-fsanitize=address,undefined", *map(str, (DRIVER, targets, code))),
        )

    def build_with_clang(self, folder: Path, clang: str) -> Path:
        """The fuzzer, with libFuzzer as its driver.

        Args:
            folder: Where it goes.
            clang: The compiler.
        """
        fuzzer = folder / "fuzzer"
        flags = ("-std=c++20", "-O1", "-g", "-fsanitize=fuzzer,address,undefined", f"-I{CORE}")
        command = (clang, *flags, *map(str, (self.targets, *self.sources)), "-o", str(fuzzer))
        subprocess.run(command, check=True)
        return fuzzer

    def run(self, folder: Path, seconds: int, seed: int) -> int:
        """Feed it; the exit status.

        Args:
            folder: Where the fuzzer and its corpus go, which grows from run to run.
            seconds: For how long.
            seed: Of the mutations.
        """
        corpus = folder / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        self.write_corpus(corpus)
        clang = shutil.which("clang++")
        if clang:
            fuzzer = self.build_with_clang(folder, clang)
            options = (f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=65536")
            return subprocess.run((fuzzer, *options, "-timeout=20", corpus), check=False).returncode
        if compiler() is None:
            sys.exit("a fuzzer needs clang++ or g++")
        command = (self.build(folder), corpus, str(seconds), str(seed))
        return subprocess.run(command, check=False).returncode

    def main(self, description: str | None, folder: Path) -> int:
        """Run it as the command line says.

        Args:
            description: Of the program.
            folder: Where the fuzzer and its corpus go by default.
        """
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--seconds", type=int, default=600)
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--folder", type=Path, default=folder, help="kept for later")
        arguments = parser.parse_args()
        return self.run(arguments.folder, arguments.seconds, arguments.seed)
