"""Uses one core from several threads at once: a program for ThreadSanitizer, run by
`test_sanitized_threads.py` with the extension module that was built for it."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvevents.codec import encode
from kvevents.events import BlockStored, EventBatch

SOURCES = 4
FULL_ATTENTION = [(0, 16, None, None, False)]
BLOCKS = (4, 3000, 2000, 10)
"""In each prompt: large batches and long prompts are worked on without the interpreter lock."""
ROUNDS = 40


def load(path: Path) -> Any:
    """The extension module at *path*, under the name that everyone imports."""
    spec = importlib.util.spec_from_file_location("router._core", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def stored(number: int, blocks: int) -> tuple[bytes, list[int]]:
    """A batch with the blocks of a prompt, and the prompt."""
    tokens = [number * 7 + place for place in range(blocks * 16)]
    hashes = [number * 100_000 + place + 1 for place in range(blocks)]
    event = BlockStored(hashes, None, tokens, block_size=16, medium="GPU", group_idx=0)
    return encode(EventBatch(0.0, [event])), tokens


def main(path: Path) -> None:
    """Apply in one thread, hash, match and serve in three, until the one is done."""
    module = load(path)
    from router.index.base import NO_HIT, ApplyResult  # noqa: PLC0415  # after the module

    core = module.Core(1, 2, [1 << 22, 8, 4096, 1 << 22, 10_000, 8192, 4096], NO_HIT, ApplyResult)
    for _ in range(SOURCES):
        add_source(core)
    batches = [stored(number, blocks) for number, blocks in enumerate(BLOCKS, 1)]
    slots = {f"source {slot}": slot for slot in range(SOURCES)}
    mirror = module.Mirror(module.Books(), 10_000, time.monotonic, [], 0.1, 0)
    is_done = threading.Event()
    failures: list[BaseException] = []

    def look() -> None:
        try:
            while not is_done.is_set():
                for _, tokens in batches:
                    look_up(module, core, tokens, slots)
                    serve(module, core, mirror, tokens)
        except BaseException as error:  # noqa: BLE001  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(ROUNDS):
        apply_all(core, [payload for payload, _ in batches])
        if number % 10 == 9:
            replace_last(core)
    is_done.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    print("done")


def replace_last(core: Any) -> None:
    core.drop(SOURCES - 1)
    while core.tidy():  # until then its slot is taken
        pass
    add_source(core)


def add_source(core: Any) -> None:
    slot = core.add(core.new_number(), [])
    core.set_layout(slot, (FULL_ATTENTION, 16, 16, True, 0), False, 0)


def apply_all(core: Any, payloads: Sequence[bytes]) -> None:
    for slot in range(SOURCES):
        for payload in payloads:
            if isinstance(core.apply(slot, payload), list):
                core.apply_reported(slot, payload, False, [])


def look_up(module: Any, core: Any, tokens: Sequence[int], slots: dict[str, int]) -> None:
    """A hit is that of no batch or of a whole one: never of half of it."""
    prompt = module.Prompt([*tokens, 1], None, None, b"")
    core.hash(prompt)
    hits = core.match(prompt, slots, [])
    assert {hit.gpu_cached_tokens for hit in hits.values()} <= {0, len(tokens)}
    core.statistics(0)


def serve(module: Any, core: Any, mirror: Any, tokens: Sequence[int]) -> None:
    """A request at one of the caches: the mirror reads the index while batches are applied."""
    prompt, count = module.Prompt([*tokens, 1], None, None, b""), len(tokens) + 1
    core.hash(prompt)
    cache = count % SOURCES
    mirror.in_prefill(prompt, count)
    mirror.outlooks(0, range(SOURCES), [5000] * SOURCES, 0.0)
    mirror.expected(cache, prompt, count, 16, 0)
    shared, prompts = core.shared(), [prompt]
    visit = mirror.begin(0, shared, cache, cache, prompts, [], count, count, 0, 1.0, (), 0, ())
    visit.first_token()
    mirror.prefilling()
    visit.ended()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
