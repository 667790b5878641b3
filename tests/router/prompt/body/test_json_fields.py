"""What is sent to replicas is encoded without risk to the process."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from router.prompt.body.json_fields import encode_json

_SHORT_OF_MEMORY = """
import resource
from router.prompt.body.json_fields import encode_json

text, kept = "x" * 8_000_000 + "é", []
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    while True:
        kept.append(encode_json({"prompt": text}))
except MemoryError:
    kept.clear()
    print("out of memory, and alive")
"""


@pytest.mark.parametrize(
    "value", [{"a": [1, None, 'ü\n"\\'], "b": {"c": 1.5}}, [], "", "x" * 1_000_000]
)
def test_what_is_encoded_is_what_msgspec_encodes(value: object) -> None:
    """Only the way there is another."""
    assert encode_json(value) == msgspec.json.encode(value)


def test_short_of_memory_the_encoder_raises_and_the_process_lives() -> None:
    """msgspec's own `encode` ends it with SIGSEGV, and every stream of the router with it."""
    done = subprocess.run(
        [sys.executable, "-c", _SHORT_OF_MEMORY],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "out of memory, and alive\n"), done.stderr
