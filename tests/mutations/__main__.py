"""`python -m tests.mutations`: try mutations and list those that no test notices.

Results are appended to a file as they come, so a run that was ended goes on where it was; a
mutation is tried again when its file, or a test that should notice it, has changed.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue

import yaml

from tests.mutations.mutate import Mutation
from tests.mutations.targets import TARGETS, mutations_of
from tests.mutations.trial import Copy, Outcome

ROOT = Path(__file__).parents[2]
EQUAL = Path(__file__).with_name("equal.yaml")
PATIENCE = 5.0
"""Times what the tests take without a mutation, and 20 s more, until they count as timed out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a mutation survived without a reason."""
    options = _options(arguments)
    chosen = list(_chosen(options))
    done = _read(options.results)
    todo = [mutation for mutation in chosen if _trial_key(mutation) not in done]
    print(f"{len(chosen)} mutations, {len(chosen) - len(todo)} of them tried before", flush=True)
    _try_all(todo, options, done)
    return _report(chosen, done)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="files whose path holds this")
    parser.add_argument("--sample", type=int, default=300, help="how many; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--results", type=Path, default=ROOT / ".mutants" / "results.jsonl")
    return parser.parse_args(arguments)


def _chosen(options: argparse.Namespace) -> Iterator[Mutation]:
    """A sample, in an order of its own, so that a run that is ended has tried some of each file."""
    found = [
        mutation
        for path in TARGETS
        if not options.only or any(part in path for part in options.only)
        for mutation in mutations_of(path, (ROOT / path).read_text(encoding="utf-8"))
    ]
    random.Random(options.seed).shuffle(found)
    yield from found[: options.sample or len(found)]


def _trial_key(mutation: Mutation) -> str:
    """Changes with the mutated file and with the tests that should notice."""
    return f"{mutation.key}-{_state_of(mutation.path)}"


@functools.cache
def _state_of(target: str) -> str:
    digest = hashlib.sha256((ROOT / target).read_bytes())
    for test in TARGETS[target]:
        for path in sorted((ROOT / test).rglob("*.py")) or [ROOT / test]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _read(results: Path) -> dict[str, Outcome]:
    if not results.is_file():
        return {}
    lines = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    return {line["key"]: Outcome(line["outcome"]) for line in lines}


def _try_all(
    todo: Sequence[Mutation], options: argparse.Namespace, done: dict[str, Outcome]
) -> None:
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvroute-mutants-") as place:
        copies: Queue[Copy] = Queue()
        for number in range(min(options.jobs, len(todo))):
            copies.put(Copy(ROOT, Path(place) / str(number)))
        limits: dict[tuple[str, ...], float] = {}

        def try_one(mutation: Mutation) -> tuple[Mutation, Outcome]:
            tests = TARGETS[mutation.path]
            copy = copies.get()
            try:
                if tests not in limits:
                    limits[tests] = 20.0 + PATIENCE * copy.time(tests, timeout_s=3600.0)
                return mutation, copy.try_out(mutation, tests, limits[tests])
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(max(1, options.jobs)) as pool, options.results.open("a") as file:
            running = [pool.submit(try_one, mutation) for mutation in todo]
            for number, trial in enumerate(as_completed(running), 1):
                mutation, outcome = trial.result()
                key, what = _trial_key(mutation), _say(mutation)
                done[key] = outcome
                line = {"key": key, "outcome": outcome.value, "what": what}
                print(json.dumps(line), file=file, flush=True)
                print(f"{number}/{len(todo)} {outcome.value}: {what}", flush=True)


def _say(mutation: Mutation) -> str:
    before = " ".join(mutation.before.split())
    return f"{mutation.path}:{mutation.line} {mutation.scope}: `{before}` -> `{mutation.after}`"


def _report(chosen: Sequence[Mutation], done: dict[str, Outcome]) -> int:
    equal = {entry["key"]: entry["reason"] for entry in yaml.safe_load(EQUAL.read_text()) or ()}
    outcomes = {mutation: done[_trial_key(mutation)] for mutation in chosen}
    counts = Counter(outcome.value for outcome in outcomes.values())
    print(", ".join(f"{count} {name}" for name, count in counts.most_common()))
    survivors = [mutation for mutation, outcome in outcomes.items() if outcome is Outcome.SURVIVED]
    unexplained = [mutation for mutation in survivors if mutation.key not in equal]
    for mutation in sorted(unexplained, key=lambda each: (each.path, each.line)):
        print(f"{mutation.key} {_say(mutation)}")
    print(f"{len(survivors) - len(unexplained)} survivors are equal, {len(unexplained)} are not")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
