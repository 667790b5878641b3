"""A directory of block files: each whole or absent, verified or deleted."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.events import GroupIdx
from offload.base import OffloadKey, pack_offload_key
from offload.errors import BlockFileError, CacheConfigError, TransferError
from offload.fs.block_file import header_bytes, key_of, relative_path
from offload.fs.store import BlockStore
from tests.offload.transfer.world import key_of as block_key

PAYLOAD = 300
KEY = block_key(0, 1)
DATA = random.Random(7).randbytes(PAYLOAD)


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    return BlockStore(tmp_path / "tier", [PAYLOAD, 2 * PAYLOAD])


def read(store: BlockStore, key: OffloadKey, size: int = PAYLOAD) -> bytes:
    payload = bytearray(size)
    store.read(key, memoryview(payload))
    return bytes(payload)


def path_of(store: BlockStore, key: OffloadKey) -> Path:
    return store.root / relative_path(key)


def files_of(store: BlockStore) -> list[str]:
    return sorted(
        path.name for path in store.root.rglob("*") if path.is_file() and path.parent != store.root
    )


# --- blocks that cover several GPU blocks ---------------------------------------------------------

OWN = KEY[:-4]
HASHES = [bytes([number]) * 32 for number in range(3)] + [OWN]


def coarse(root: Path) -> BlockStore:
    """Four GPU blocks in a block of the first group, one in the second."""
    return BlockStore(root, [PAYLOAD, PAYLOAD], blocks_per_offloaded_block=[4, 1])


def test_the_hashes_of_a_blocks_gpu_blocks_survive_the_process(tmp_path: Path) -> None:
    """Without them the next one finds it by its last GPU block only, and so hardly ever."""
    store, other = coarse(tmp_path), block_key(1, 2)
    store.write(KEY, memoryview(DATA), HASHES)
    store.write(other, memoryview(DATA))
    assert store.file_bytes(KEY) == store.file_bytes(other) + 3 * 32
    found = {file.key: file for file in coarse(tmp_path).scan()}
    assert (found[KEY].block_hashes, found[other].block_hashes) == (HASHES, ())
    assert found[KEY].file_bytes == path_of(store, KEY).stat().st_size == store.file_bytes(KEY)
    assert read(store, KEY) == read(store, other) == DATA


@pytest.mark.parametrize("place", [0, 40, 95])
def test_a_flipped_bit_in_a_hash_is_found_before_the_block_is_served(
    tmp_path: Path, place: int
) -> None:
    """The checksum covers them."""
    store = coarse(tmp_path)
    store.write(KEY, memoryview(DATA), HASHES)
    contents = bytearray(path_of(store, KEY).read_bytes())
    contents[header_bytes(KEY) + place] ^= 1
    path_of(store, KEY).write_bytes(contents)
    with pytest.raises(BlockFileError):
        read(store, KEY)
    assert files_of(store) == []


@pytest.mark.parametrize(
    ("hashes", "complaint"),
    [
        ([], "0 block hashes of a block of group 0 must be 4 of 32 bytes"),
        (HASHES[1:], "3 block hashes"),
        ([*HASHES[1:], b"short"], "4 block hashes .* must be 4 of 32 bytes"),
    ],
)
def test_hashes_that_do_not_fit_are_refused(
    tmp_path: Path, hashes: list[bytes], complaint: str
) -> None:
    """The file's length would not be the block's."""
    store = coarse(tmp_path)
    with pytest.raises(TransferError, match=complaint):
        store.write(KEY, memoryview(DATA), hashes)
    assert files_of(store) == []


def test_a_directory_that_keeps_other_hashes_is_refused(tmp_path: Path) -> None:
    """Its files have other lengths and would all be deleted by the scan."""
    coarse(tmp_path)
    for sizes in (None, [1, 1], [2, 1]):
        with pytest.raises(CacheConfigError, match=r"manifest\.json must be that of this layout"):
            BlockStore(tmp_path, [PAYLOAD, PAYLOAD], blocks_per_offloaded_block=sizes)


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [False, True])
def test_what_was_written_is_read(tmp_path: Path, durable: bool) -> None:
    """With and without waiting for the disk; a key keeps its latest payload."""
    store = BlockStore(tmp_path, [PAYLOAD], durable=durable)
    store.write(KEY, memoryview(b"x" * PAYLOAD))
    store.write(KEY, memoryview(DATA))
    assert read(store, KEY) == DATA
    assert files_of(store) == [path_of(store, KEY).name]
    statistics = store.statistics()
    assert (statistics.written_blocks, statistics.written_bytes) == (2, 2 * PAYLOAD)
    assert (statistics.read_blocks, statistics.read_bytes, statistics.rejected_blocks) == (
        1,
        PAYLOAD,
        0,
    )


@given(place=st.integers(0, header_bytes(KEY) + PAYLOAD - 1), bit=st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_a_flipped_bit_anywhere_is_found_and_the_file_deleted(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    """One wrong byte of KV cache is a wrong response that cannot be explained."""
    store = BlockStore(tmp_path_factory.mktemp("tier"), [PAYLOAD])
    store.write(KEY, memoryview(DATA))
    contents = bytearray(path_of(store, KEY).read_bytes())
    contents[place] ^= 1 << bit
    path_of(store, KEY).write_bytes(contents)
    with pytest.raises(BlockFileError):
        read(store, KEY)
    assert files_of(store) == []
    assert store.statistics().rejected_blocks == 1


@pytest.mark.parametrize(
    "size",
    [0, 1, header_bytes(KEY), header_bytes(KEY) + PAYLOAD - 1, header_bytes(KEY) + PAYLOAD + 1],
)
def test_a_file_of_another_length_is_refused_and_deleted(store: BlockStore, size: int) -> None:
    """A power failure leaves such a file if it was renamed before its bytes were on the disk."""
    store.write(KEY, memoryview(DATA))
    contents = path_of(store, KEY).read_bytes()
    path_of(store, KEY).write_bytes((contents + b"x")[:size])
    with pytest.raises(BlockFileError, match="length"):
        read(store, KEY)
    assert files_of(store) == []


def test_a_whole_file_under_another_name_is_refused(store: BlockStore) -> None:
    """If it was copied or renamed, it is intact, but another prompt's."""
    other = block_key(0, 2)
    store.write(KEY, memoryview(DATA))
    path_of(store, other).parent.mkdir(parents=True, exist_ok=True)
    path_of(store, KEY).rename(path_of(store, other))
    with pytest.raises(BlockFileError, match="damaged"):
        read(store, other)
    assert files_of(store) == []


def test_a_missing_or_unreadable_file_is_an_error_of_ours(store: BlockStore) -> None:
    """A tier that loses a file has a miss; the engine goes on."""
    with pytest.raises(BlockFileError, match="cannot be read: No such file"):
        read(store, KEY)
    path_of(store, KEY).mkdir(parents=True)
    assert store.scan() == []
    with pytest.raises(BlockFileError, match="cannot be read: Is a directory"):
        read(store, KEY)


def test_a_write_that_fails_leaves_nothing_and_the_old_file_stays(store: BlockStore) -> None:
    """A full or broken disk leaves no partial file and loses nothing."""
    store.write(KEY, memoryview(DATA))
    resource_limit = f"""
import resource, signal, sys
from pathlib import Path
from offload.fs.store import BlockStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = BlockStore(Path(sys.argv[1]), [{PAYLOAD}, {2 * PAYLOAD}])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    store.write(bytes.fromhex(sys.argv[2]), memoryview(b"y" * {PAYLOAD}))
except OSError:
    sys.exit(7)
"""
    command = [sys.executable, "-c", resource_limit, str(store.root), KEY.hex()]
    assert subprocess.run(command, check=False, cwd=Path(__file__).parents[3]).returncode == 7
    assert files_of(store) == [path_of(store, KEY).name]
    assert read(store, KEY) == DATA


@pytest.mark.parametrize(
    ("key", "payload", "complaint"),
    [
        (KEY, b"x", "payload of 1 bytes must be 300"),
        (block_key(1, 1), DATA, "payload of 300 bytes must be 600"),
        (block_key(2, 1), DATA, "a key of group 2 must belong to one of 2 groups"),
        (OffloadKey(b"\0\0\0\0"), DATA, "a key of 4 bytes must have 5 to 120"),
        (pack_offload_key(b"x" * 117, GroupIdx(0)), DATA, "a key of 121 bytes"),
    ],
)
def test_a_block_that_does_not_belong_to_this_directory_is_refused(
    store: BlockStore, key: OffloadKey, payload: bytes, complaint: str
) -> None:
    """It would be read back into a block of another size."""
    with pytest.raises(TransferError, match=complaint):
        store.write(key, memoryview(payload))
    assert files_of(store) == []


@given(st.binary(min_size=5, max_size=120))
def test_a_name_leads_back_to_its_key(key: bytes) -> None:
    """A restart identifies a file by its name only."""
    path = relative_path(OffloadKey(key))
    assert key_of(path) == key
    assert all(len(part) <= 255 for part in path.split("/"))
    assert key_of("f" + path[1:]) in (None, key)


def test_a_scan_reports_whole_files_by_use_and_deletes_the_rest(store: BlockStore) -> None:
    """After a restart the tier continues where it was, without the remains of a crash."""
    keys = [block_key(number % 2, number) for number in range(6)]
    for number, key in enumerate(keys):
        store.write(key, memoryview(bytes(PAYLOAD * (1 + number % 2))))
        os.utime(path_of(store, key), ns=(0, 1000 * (10 - number)))
    directory = path_of(store, keys[0]).parent
    for junk in ("1-2-3.tmp", "0123.block", f"{'ab' * 36}.block"):
        (directory / junk).write_bytes(b"junk")
    (directory / "notes.txt").write_bytes(b"somebody's")
    path_of(store, keys[3]).write_bytes(b"cut off")
    found = store.scan()
    assert [file.key for file in found] == [keys[5], keys[4], keys[2], keys[1], keys[0]]
    assert [file.file_bytes for file in found] == [store.file_bytes(file.key) for file in found]
    assert len(files_of(store)) == 6
    assert (directory / "notes.txt").exists()


def test_reading_makes_a_file_the_most_recently_used(store: BlockStore) -> None:
    """So the order of use survives a restart."""
    for number in (1, 2):
        store.write(block_key(0, number), memoryview(DATA))
        os.utime(path_of(store, block_key(0, number)), ns=(number, number))
    read(store, block_key(0, 1))
    assert [file.key for file in store.scan()] == [block_key(0, 2), block_key(0, 1)]


@pytest.mark.parametrize(
    ("payload_bytes", "identity"),
    [([PAYLOAD], ""), ([2, 1], ""), ([PAYLOAD, 2 * PAYLOAD], "other model")],
)
def test_a_directory_of_another_layout_or_model_is_refused(
    store: BlockStore, payload_bytes: list[int], identity: str
) -> None:
    """Block hashes do not include the model: its blocks would verify and be wrong."""
    store.write(KEY, memoryview(DATA))
    with pytest.raises(CacheConfigError, match="must be that of this layout and identity") as error:
        BlockStore(store.root, payload_bytes, identity)
    assert read(store, KEY) == DATA
    assert "delete what is in this one" in str(error.value)
    shutil.rmtree(store.root)
    assert BlockStore(store.root, payload_bytes, identity).scan() == []


def test_the_same_layout_opens_again(store: BlockStore) -> None:
    """After a restart, and in the model's process as in the scheduler's."""
    store.write(KEY, memoryview(DATA))
    again = BlockStore(store.root, store.payload_bytes)
    assert read(again, KEY) == DATA


OPENER = """
import sys
from pathlib import Path
from offload.errors import CacheConfigError
from offload.fs.store import BlockStore
print(flush=True)
for line in sys.stdin:
    try:
        BlockStore(Path(line.strip()), [8], sys.argv[1])
    except CacheConfigError:
        print("refused", flush=True)
    else:
        print("opened", flush=True)
"""


@pytest.mark.parametrize(
    ("others", "outcomes"), [("a", ["opened", "opened"]), ("b", ["opened", "refused"])]
)
def test_a_new_directory_is_the_first_ones_that_opens_it(
    tmp_path: Path, others: str, outcomes: list[str]
) -> None:
    """An engine's two processes start together; so may two engines that were given one directory by
    mistake."""
    with ExitStack() as stack:
        openers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", OPENER, identity],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    cwd=Path(__file__).parents[3],
                    text=True,
                )
            )
            for identity in ("a", others)
        ]
        pipes = [(opener.stdin, opener.stdout) for opener in openers]
        for _, found in pipes:
            assert found is not None
            assert found.readline() == "\n", "it is ready"
        for number in range(30):
            for asked, _ in pipes:
                assert asked is not None
                asked.write(f"{tmp_path / str(number)}\n")
                asked.flush()
            assert sorted(found.readline().strip() for _, found in pipes if found) == outcomes


def test_a_directory_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    """A mistyped path must not mix blocks into a user's files, nor delete any."""
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(
        CacheConfigError,
        match=r"holds 'thesis.tex' and no manifest.json; a new directory must be empty",
    ) as refused:
        BlockStore(tmp_path, [PAYLOAD])
    assert refused.value.__context__ is None, "the traceback names no other error"
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize("payload_bytes", [[], [0], [8, -8]])
def test_a_layout_without_bytes_is_refused(tmp_path: Path, payload_bytes: list[int]) -> None:
    """At the start, with the rule."""
    with pytest.raises(CacheConfigError, match="must be one positive number for each group"):
        BlockStore(tmp_path, payload_bytes)


def test_a_directory_has_one_manager_at_a_time(store: BlockStore) -> None:
    """Two of them would delete each other's blocks and serve missing ones."""
    store.scan()
    store.scan()
    second = BlockStore(store.root, store.payload_bytes)
    with pytest.raises(CacheConfigError, match="is in use by another manager"):
        second.scan()
    store.close()
    store.close()
    assert second.scan() == []


WRITER = """
import os, sys, threading
from pathlib import Path
from offload.base import OffloadKey
from offload.fs.store import BlockStore
size = int(sys.argv[2])
store = BlockStore(Path(sys.argv[1]), [size])
store.scan()
def write(first):
    for number in range(first, 1000, 2):
        name = number.to_bytes(32, "little") + bytes(4)
        store.write(OffloadKey(name), memoryview(bytes([number % 251]) * size))
        os.write(1, b"%d\\n" % number)  # one call a line: two threads write
threads = [threading.Thread(target=write, args=(first,)) for first in (0, 1)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.parametrize("kill_after", [1, 3, 6, 10])
def test_a_killed_process_leaves_only_whole_files(tmp_path: Path, kill_after: int) -> None:
    """SIGKILL while two threads write.

    What the restart finds verifies, and every finished write is there.
    """
    size = 8 << 20
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(size)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    ) as process:
        assert process.stdout is not None
        finished = [int(process.stdout.readline()) for _ in range(kill_after)]
        while not list(tmp_path.glob("*/*/*.tmp")):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    store = BlockStore(tmp_path, [size])
    found = {int.from_bytes(file.key[:32], "little") for file in store.scan()}
    assert found >= set(finished)
    for number in found:
        payload = read(store, OffloadKey(number.to_bytes(32, "little") + bytes(4)), size)
        assert payload == bytes([number % 251]) * size
    assert list(tmp_path.glob("*/*/*.tmp")) == []
