"""What a sequence number means, decided without sockets."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.sequence import SequenceTracker, _hash, fingerprint
from kvevents.stream_state import Input


def mark(seq: int, process: str = "a") -> int:
    return fingerprint(f"{process} {seq}".encode())


def tracker_at(last: int, first: int = 0, remembered: int = 4096) -> SequenceTracker:
    tracker = SequenceTracker(remembered)
    for seq in range(first, last + 1):
        tracker.advance(seq, mark(seq))
    return tracker


def test_no_ring_has_answered_before_one_is_asked() -> None:
    """An empty ring then means that nothing was published, not that the process is another."""
    assert SequenceTracker().ring_answers == 0


def test_a_stream_begins_with_zero() -> None:
    """A later first batch means that something was missed."""
    tracker = SequenceTracker()
    assert tracker.classify(0, mark(0)) is Input.NEXT
    assert tracker.classify(1, mark(1)) is Input.GAP


def test_the_number_behind_the_last_is_next() -> None:
    """The ordinary case must never be taken for trouble."""
    assert tracker_at(7).classify(8, mark(8)) is Input.NEXT


def test_a_number_further_ahead_is_a_gap() -> None:
    """PUB drops at its high-water mark."""
    assert tracker_at(7).classify(9, mark(9)) is Input.GAP


def test_an_old_number_with_the_same_payload_is_a_duplicate() -> None:
    """Relays repeat and delay; that must not cost a rebuild."""
    tracker = tracker_at(7)
    assert all(tracker.classify(seq, mark(seq)) is Input.DUPLICATE for seq in range(8))


def test_an_old_number_with_another_payload_is_backwards() -> None:
    """A restarted engine counts from 0 again, with other contents."""
    tracker = tracker_at(7)
    assert tracker.classify(3, mark(3, "b")) is Input.BACKWARDS
    assert tracker.classify(7, mark(7, "b")) is Input.BACKWARDS


def test_an_old_number_that_is_no_longer_remembered_is_backwards() -> None:
    """It cannot be told from another process's, and asking is cheap."""
    tracker = tracker_at(20, remembered=8)
    assert tracker.classify(13, mark(13)) is Input.DUPLICATE
    assert tracker.classify(12, mark(12)) is Input.BACKWARDS


def test_after_a_loss_nothing_before_it_is_remembered() -> None:
    """What was never seen cannot be recognised, nor may an older batch in its slot stand for it."""
    tracker = tracker_at(7)
    tracker.advance(10, mark(10))
    assert tracker.last == 10
    assert tracker.recall(10) == mark(10)
    assert [tracker.recall(seq) for seq in (7, 8, 9, 11)] == [None] * 4


def test_a_snapshot_has_a_number_without_a_fingerprint_until_one_is_learned() -> None:
    """A snapshot stands for a batch that was never seen."""
    tracker = tracker_at(7)
    tracker.jump(100)
    assert tracker.recall(100) is None
    assert tracker.classify(101, mark(101)) is Input.NEXT
    tracker.learn(mark(100))
    assert tracker.recall(100) == mark(100)
    assert tracker.classify(100, mark(100)) is Input.DUPLICATE


def test_after_forgetting_a_stream_begins_with_zero_again() -> None:
    """The next process shares nothing with the one before."""
    tracker = tracker_at(7)
    tracker.publisher_id = "a"
    tracker.forget()
    assert (tracker.last, tracker.publisher_id, tracker.recall(7)) == (None, None, None)
    assert tracker.classify(0, mark(0, "b")) is Input.NEXT


def test_classifying_changes_nothing() -> None:
    """A batch is classified before it is known whether it can be applied at all."""
    tracker = tracker_at(7)
    for seq in (0, 7, 8, 9, 100):
        tracker.classify(seq, mark(seq))
    assert tracker.last == 7
    assert tracker.classify(8, mark(8)) is Input.NEXT


@pytest.mark.parametrize("fingerprint", [fingerprint, _hash], ids=["xxhash", "without xxhash"])
def test_payloads_that_differ_in_one_bit_have_different_fingerprints(
    fingerprint: Callable[[bytes], int],
) -> None:
    """An engine's batches differ in a hash or two; the number alone does not tell processes
    apart."""
    payload = bytes(range(200))
    changed = {
        payload[:at] + bytes([payload[at] ^ 1 << bit]) + payload[at + 1 :]
        for at in range(200)
        for bit in range(8)
    }
    assert len({fingerprint(each) for each in changed | {payload}}) == 1601
    assert all(0 <= fingerprint(each) < 2**64 for each in changed)


def test_a_replay_begins_where_the_last_one_proved_everything_within_bounds() -> None:
    """Batches that fitted in by their number alone are compared; all of a long stream would cost
    the engine too much."""
    tracker = SequenceTracker(remembered=100)
    assert tracker.unproven_since(10) is None
    for seq in range(20):
        tracker.advance(seq, mark(seq))
    assert tracker.unproven_since(50) == 0
    assert tracker.unproven_since(10) == 9
    tracker.prove()
    assert tracker.unproven_since(50) == 19
    tracker.advance(20, mark(20))
    assert tracker.unproven_since(50) == 19
    tracker.advance(25, mark(25))
    assert tracker.unproven_since(50) == 25, "nothing before a loss is remembered"
    tracker.jump(40)
    assert tracker.unproven_since(50) == 40
    for seq in range(41, 341):
        tracker.advance(seq, mark(seq))
    assert tracker.unproven_since(1000) == 340 - 99
    assert tracker.recall(340 - 99) == mark(340 - 99)


@given(st.integers(1, 40), st.integers(0, 2**32), st.integers(1, 120))
def test_memory_is_exactly_the_last_batches_whatever_came(
    remembered: int, seed: int, steps: int
) -> None:
    """The ring of fingerprints must agree with a plain dictionary, across jumps and losses too."""
    rng = random.Random(seed)
    tracker = SequenceTracker(remembered)
    known: dict[int, int] = {}
    for _ in range(steps):
        last = tracker.last
        seq = 0 if last is None else last + 1
        if rng.random() < 0.2:
            seq += rng.randrange(1, 50)
            known.clear()
        tracker.advance(seq, mark(seq))
        known[seq] = mark(seq)
        known = {kept: value for kept, value in known.items() if kept > seq - remembered}
        assert {
            each: tracker.recall(each) for each in range(seq + 2) if tracker.recall(each)
        } == known
