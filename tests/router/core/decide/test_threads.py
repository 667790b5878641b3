"""The rules of `decide.hpp` for threads, under sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.native import CORE, compiled, compiler

DRIVER = Path(__file__).parent / "threads.cpp"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_that_decide_while_the_fleet_changes_do_not_race(
    tmp_path: Path, sanitizer: str
) -> None:
    """Every thread of the plane decides and books by itself; what it reads, others write."""
    if compiler() is None:
        pytest.skip("no C++ compiler: the compiled core is not built")
    of_core = [path for room in ("decide", "index") for path in (CORE / room).glob("*.cpp")]
    sources = [str(DRIVER), *map(str, sorted(of_core))]
    options = ("-O1", "-g1", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}\n", encoding="ascii")
    known = subprocess.run(
        [compiler() or "", *options, str(probe), "-o", str(tmp_path / "probe")],
        capture_output=True,
        check=False,
    )
    if known.returncode:
        pytest.skip(f"the compiler has no sanitizer for {sanitizer}")
    program = compiled(tmp_path / "threads", *options, *sources)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer cannot run here: the kernel spreads memory too far")
    assert done.returncode == 0, done.stderr[:4000]
    assert done.stdout == "done\n"
