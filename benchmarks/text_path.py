"""What does a prompt cost the router that comes as text, and does it stay the same?

Router processes with a tokenizer of their own; stub replicas and the load generator share another
process. The load is cut into slices of as many requests; of each slice the CPU time of the router
per request, and the memory it holds at the end. No two prompts are alike: each begins with a
number. `turns` is a conversation of 20 turns that grows, then begins anew.

Since other load on the machine makes the same work take more CPU time, every slice is sent in small
parts, in turn to this router and to another one that gets the first slice each time: a router that
ages costs more than that one (`to_control`).

The tokenizer is made here, from Python's own sources, unless `--model` names a model's directory.
With `--library tokenizers` it has a form that fastokens is not used for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from benchmarks.figures import report
from benchmarks.load import run_load, stub_replica
from benchmarks.proxy import RouterProcess

_HEAD = (
    b"POST %s HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MODULES = ("argparse", "asyncio/base_events", "datetime", "decimal", "inspect", "typing")
_TURNS = 20
_PARTS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=["prompt", "chat", "turns"], default="prompt")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--slices", type=int, default=5)
    parser.add_argument("--kilobytes", type=int, default=1, help="of text in a prompt")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--library", choices=["fastokens", "tokenizers"], default="fastokens")
    parser.add_argument("--model", type=Path, help="a model's directory, instead of a made one")
    asyncio.run(_measure(parser.parse_args()))


async def _measure(options: argparse.Namespace) -> None:
    replicas = [await stub_replica() for _ in range(options.replicas)]
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as made:
        directory = options.model or write_model(Path(made), options.library)
        models_of_router = [{"name": "bench", "tokenizer": str(directory)}]
        async with (
            RouterProcess(replicas, False, models_of_router) as router,
            RouterProcess(replicas, False, models_of_router) as control,
        ):
            await _slices(router, control, options)


async def _slices(
    router: RouterProcess, control: RouterProcess, options: argparse.Namespace
) -> None:
    make = _request_maker(options.form, options.kilobytes * 1024)
    size = options.requests // options.slices
    part = max(size // _PARTS, 1)
    for number in range(options.slices):
        cpu_us = dict.fromkeys((router, control), 0.0)
        errors = 0
        for start in range(0, part * _PARTS, part):
            for target, first in ((router, number * size), (control, 0)):
                before = target.cpu_seconds()
                some = _ended(make, first + start, part)
                load = await run_load(target.port, some, options.concurrency, seconds=3600)
                cpu_us[target] += (target.cpu_seconds() - before) / (part * _PARTS) * 1e6
                errors += load.errors
        report(
            "text_path",
            form=options.form,
            kilobytes=options.kilobytes,
            library=options.library,
            requests=(number + 1) * part * _PARTS,
            router_cpu_us=round(cpu_us[router], 1),
            to_control=round(cpu_us[router] / cpu_us[control], 3),
            rss_mb=round(router.rss_bytes() / 2**20, 1),
            control_rss_mb=round(control.rss_bytes() / 2**20, 1),
            errors=errors,
        )


def _ended(make: Callable[[int], bytes], start: int, count: int) -> Callable[[int], bytes | None]:
    return lambda number: make(start + number) if number <= count else None


def _request_maker(form: str, size: int) -> Callable[[int], bytes]:
    """Return requests by number; the texts are cut from Python's sources."""
    corpus = _corpus()

    def text(number: int, length: int) -> str:
        start = random.Random(number).randrange(len(corpus) - length)
        return f"{number} {corpus[start : start + length]}"

    def body(number: int) -> dict[str, object]:
        if form == "prompt":
            return {"prompt": text(number, size)}
        if form == "chat":
            return {"messages": [{"role": "user", "content": text(number, size)}]}
        first = number - number % _TURNS
        messages = [
            {"role": ("user", "assistant")[turn % 2], "content": text(first + turn, size)}
            for turn in range(2 * (number - first) + 1)
        ]
        return {"messages": messages}

    def make(number: int) -> bytes:
        content = json.dumps({"model": "bench", "max_tokens": 1, **body(number)}).encode()
        path = b"/v1/completions" if form == "prompt" else b"/v1/chat/completions"
        return _HEAD % (path, len(content)) + content

    return make


def write_model(directory: Path, library: str) -> Path:
    """Write a byte-level BPE tokenizer with a chat template; for fastokens, or in a form for the
    tokenizers library only."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if library == "tokenizers":
        tokenizer.normalizer = normalizers.NFKC()
    trainer = trainers.BpeTrainer(
        vocab_size=16_384,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus().splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    return directory


def _corpus() -> str:
    library = Path(sysconfig.get_path("stdlib"))
    return "".join((library / f"{name}.py").read_text() for name in _MODULES)


if __name__ == "__main__":
    sys.exit(main())
