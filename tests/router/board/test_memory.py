"""The board in memory that workers share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.board.memory import BEAT_S, EXPIRY_S, SLOT_BYTES, SharedMemoryBoard, create_memory

ROOT = Path(__file__).parents[3]


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = create_memory(3)
    yield descriptor
    os.close(descriptor)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_worker_reads_what_the_others_said_last(memory: int) -> None:
    """The sums of load depend on it; one's own slot counts at home."""
    first, second = SharedMemoryBoard(memory, 0, 3), SharedMemoryBoard(memory, 1, 3)
    assert first.read() == {}
    second.publish(b"old")
    second.publish(b"new")
    assert first.read() == {"1": b"new"}
    assert second.read() == {}
    first.publish(b"mine")
    assert second.read() == {"0": b"mine"}
    assert second.statistics().writers == 1


def test_a_slot_that_has_not_changed_is_the_same_object(memory: int) -> None:
    """So nobody decodes it again, fifty times a second."""
    first, second = SharedMemoryBoard(memory, 0, 3), SharedMemoryBoard(memory, 1, 3)
    second.publish(b"words" * 10)
    before = first.read()["1"]
    second.refresh()
    assert first.read()["1"] is before
    second.publish(b"words" * 10)
    assert first.read()["1"] is not before


def test_the_slot_of_a_worker_that_is_gone_expires_and_that_of_a_quiet_one_does_not(
    memory: int,
) -> None:
    """Load of the dead would keep requests away from a replica for ever."""
    clock = Clock()
    reader = SharedMemoryBoard(memory, 0, 3, clock)
    quiet, gone = (SharedMemoryBoard(memory, number, 3, clock) for number in (1, 2))
    quiet.publish(b"quiet")
    gone.publish(b"gone")
    while clock.now < 100.0 + EXPIRY_S + BEAT_S:
        clock.now += BEAT_S
        quiet.refresh()
    assert reader.read() == {"1": b"quiet"}
    gone.publish(b"back")
    assert reader.read() == {"1": b"quiet", "2": b"back"}


def test_a_worker_takes_over_the_slot_of_one_that_was_killed_while_it_wrote(memory: int) -> None:
    """Its first half may stand there, with an odd number in front."""
    reader, killed = SharedMemoryBoard(memory, 0, 3), SharedMemoryBoard(memory, 1, 3)
    killed.publish(b"whole")
    sequence = slice(SLOT_BYTES, SLOT_BYTES + 8)
    number = int.from_bytes(killed._memory[sequence], "little")
    killed._memory[sequence] = (number + 1).to_bytes(8, "little")
    assert reader.read() == {}
    SharedMemoryBoard(memory, 1, 3).publish(b"next")
    assert reader.read() == {"1": b"next"}


WRITER = """
import random, sys
from router.board.memory import SharedMemoryBoard
board, chance = SharedMemoryBoard(int(sys.argv[1]), 1, 3), random.Random(1)
while True:
    board.publish(bytes([chance.randrange(256)]) * chance.randrange(1, 50_000))
"""


def test_a_slot_is_never_read_in_part(memory: int) -> None:
    """Half a slot would be someone else's load."""
    reader = SharedMemoryBoard(memory, 0, 3)
    seen: set[bytes] = set()
    command = (sys.executable, "-c", WRITER, str(memory))
    with subprocess.Popen(command, pass_fds=(memory,), cwd=ROOT) as writer:
        try:
            while len(seen) < 200:
                assert writer.poll() is None
                for data in reader.read().values():
                    assert len(set(data)) == 1
                    seen.add(data[:1])
        finally:
            writer.kill()
