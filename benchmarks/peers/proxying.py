"""Rows of the proxy: requests and streams passed on. Ours beside vLLM's router, SMG, SGLang's
router and nginx."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figures import report
from benchmarks.peers.contestants import (
    MODEL,
    Proxy,
    kvroute_proxy,
    nginx,
    sglang_router,
    smg,
    vllm_router,
)
from benchmarks.peers.programs import Missing, Prompts, Replicas, Settings, load
from benchmarks.peers.publishing import (
    BLOCK_SIZE,
    Publisher,
    batches,
    block_hashes,
    run_tokens,
    stored,
)

_REPLICAS = 4
_PREFIXES = 32
"""Groups of prompts that share three quarters of their length."""

Make = Callable[[Sequence[str], Sequence[str]], Proxy]


# --- what is sent ---------------------------------------------------------------------------------


def id_prompts(kilobytes: int, stream: bool = False) -> Prompts:
    """Return completions of token ids.

    Args:
        kilobytes: About the size of a body.
        stream: Whether to stream the response.
    """
    count = kilobytes * 1024 // 7
    shared = [_token_text(_prefix_tokens(number, count)) for number in range(_PREFIXES)]
    heads = [f'{{"model":"{MODEL}","prompt":[{each},' for each in shared]
    own = _token_text(run_tokens(77, count - count * 3 // 4))
    return Prompts("/v1/completions", heads, f"{own}]{_tail(stream)}", ",")


def _prefix_tokens(number: int, count: int) -> list[int]:
    # Six digits each, so that bodies of one size have one number of tokens.
    return [100_000 + each % 27_000 for each in run_tokens(number, count * 3 // 4)]


def _token_text(tokens: Sequence[int]) -> str:
    return ",".join(map(str, tokens))


def text_prompts(kilobytes: int, stream: bool = False) -> Prompts:
    """Return chats of plain text.

    Args:
        kilobytes: About the size of a body.
        stream: Whether to stream the response.
    """
    size = kilobytes * 1024
    heads = []
    for number in range(_PREFIXES):
        words = " ".join(_word(number * 7 + at) for at in range(size // 6))[: size * 3 // 4]
        heads.append(f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"{words} ')
    own = " ".join(_word(at * 3 + 1) for at in range(size // 6))[: size // 4]
    return Prompts("/v1/chat/completions", heads, f'{own}"}}]{_tail(stream)}', " ")


def _word(number: int) -> str:
    syllables = ("ka", "lo", "mi", "ter", "an", "shu", "pe", "or", "din", "gra", "ves", "tu")
    return syllables[number % 12] + syllables[number * 7 % 11] + syllables[number * 5 % 7]


def _tail(stream: bool) -> str:
    # Spaces do not matter to a router; that all of them send the same bytes does.
    return ',"max_tokens":64' + (',"stream":true}' if stream else "}")


@contextmanager
def tokenizer() -> Iterator[Path | None]:
    """Yield a small model directory with a byte-level BPE; None without the package
    `tokenizers`."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    except ImportError:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as directory:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=4096,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator((text_prompts(4).prefixes), trainer)
        made.save(str(Path(directory) / "tokenizer.json"))
        template = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}"
        settings = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
        (Path(directory) / "tokenizer_config.json").write_text(json.dumps(settings))
        yield Path(directory)


# --- requests -------------------------------------------------------------------------------------


def requests_of_ids(settings: Settings) -> None:
    """CPU time per request of token ids, with the replicas' events."""
    makes: dict[str, Make] = {
        "kvroute": lambda urls, events: kvroute_proxy(urls, events, settings.core),
        "vllm-router kv_aware": lambda urls, events: vllm_router(
            urls, events, settings.core, "kv_aware"
        ),
        "nginx": lambda urls, _: nginx(urls, settings.core),
    }
    for kilobytes in settings.kilobytes:
        prompts = id_prompts(kilobytes)
        for _ in range(settings.rounds):
            for name, make in _allowed(settings, makes):
                _requests("ids_and_events", name, make, settings, prompts, kilobytes)


def requests_of_text(settings: Settings) -> None:
    """CPU time per chat. Ours tokenises it; none of the others does."""
    with tokenizer() as directory:
        makes: dict[str, Make] = {
            "kvroute": lambda urls, events: kvroute_proxy(urls, events, settings.core, directory),
            "vllm-router cache_aware": lambda urls, _: vllm_router(
                urls, (), settings.core, "cache_aware"
            ),
            "smg cache_aware": lambda urls, _: smg(urls, settings.core),
            "sglang-router cache_aware": lambda urls, _: sglang_router(urls, settings.core),
        }
        if directory is None:
            report("text", of="kvroute", skipped="the package tokenizers")
            del makes["kvroute"]
        for kilobytes in settings.kilobytes:
            prompts = text_prompts(kilobytes)
            for _ in range(settings.rounds):
                for name, make in _allowed(settings, makes):
                    _requests("text", name, make, settings, prompts, kilobytes)


def _allowed(settings: Settings, makes: dict[str, Make]) -> Iterator[tuple[str, Make]]:
    for name, make in makes.items():
        if settings.with_peers or name == "kvroute":
            yield name, make


def _requests(
    row: str, name: str, make: Make, settings: Settings, prompts: Prompts, kilobytes: int
) -> None:
    def measure(proxy: Proxy) -> dict[str, Any]:
        load(settings.programs, proxy.port, prompts, 16, 1.0, core=settings.other_core)
        before = proxy.process.cpu_s()
        measured = load(
            settings.programs, proxy.port, prompts, 16, settings.seconds, core=settings.other_core
        )
        used = proxy.process.cpu_s() - before
        return {
            "cpu_us_per_request": round(used / max(1, measured["requests"]) * 1e6, 1),
            "requests_per_second": round(measured["requests"] / measured["seconds"]),
            "errors": measured["errors"],
            "p50_ms": measured["latency_p50_us"] / 1e3,
            "p99_ms": measured["latency_p99_us"] / 1e3,
        }

    _compete(row, name, make, settings, measure, kilobytes=kilobytes)


# --- streams --------------------------------------------------------------------------------------


def streams(settings: Settings) -> None:
    """Paced streams, all at the same time: the first token, gaps, and CPU time per token."""
    makes: dict[str, Make] = {
        "kvroute": lambda urls, events: kvroute_proxy(urls, events, settings.core),
        "vllm-router kv_aware": lambda urls, events: vllm_router(
            urls, events, settings.core, "kv_aware"
        ),
        "nginx": lambda urls, _: nginx(urls, settings.core),
    }
    prompts = id_prompts(1, stream=True)
    for count in settings.streams:
        interval_ms = 5 if count <= 64 else 20

        def measure(proxy: Proxy, count: int = count) -> dict[str, Any]:
            before = proxy.process.cpu_s()
            measured = load(
                settings.programs,
                proxy.port,
                prompts,
                count,
                settings.seconds * 2,
                core=settings.other_core,
            )
            used = proxy.process.cpu_s() - before
            return {
                "cpu_us_per_token": round(used / max(1, measured["tokens"]) * 1e6, 2),
                "tokens_per_second": round(measured["tokens"] / measured["seconds"]),
                "errors": measured["errors"],
                "ttft_p50_ms": measured["first_token_p50_us"] / 1e3,
                "ttft_p99_ms": measured["first_token_p99_us"] / 1e3,
                "gap_p99_ms": measured["gap_p99_us"] / 1e3,
                "gap_max_ms": measured["gap_max_us"] / 1e3,
            }

        for _ in range(settings.rounds):
            for name, make in _allowed(settings, makes):
                _compete(
                    "streams", name, make, settings, measure, interval_ms=interval_ms, streams=count
                )


def _compete(
    row: str,
    name: str,
    make: Make,
    settings: Settings,
    measure: Callable[[Proxy], dict[str, Any]],
    interval_ms: int = 20,
    **where: Any,
) -> None:
    """Start replicas, their events and a proxy, and measure it."""
    with ExitStack() as stack:
        replicas = stack.enter_context(
            Replicas(settings.programs, _REPLICAS, 100, interval_ms, settings.other_core)
        )
        publisher = Publisher(_REPLICAS)
        stack.callback(publisher.close)
        try:
            proxy = make(replicas.urls, publisher.endpoints)
        except Missing as missing:
            report(row, of=name, skipped=str(missing), **where)
            return
        stack.callback(proxy.close)
        if row != "text" and name != "nginx":
            publish_prefixes(publisher, where.get("kilobytes", 1))
        report(row, of=name, **where, **measure(proxy))


def publish_prefixes(publisher: Publisher, kilobytes: int) -> None:
    """Replica i holds every prefix of `id_prompts` whose number is i modulo their count.

    Args:
        publisher: Of all replicas.
        kilobytes: Of the prompts.
    """
    publisher.wait_for_subscribers()
    count = kilobytes * 1024 // 7
    replicas = len(publisher.endpoints)
    data = []
    for source in range(replicas):
        events = []
        for number in range(source, _PREFIXES, replicas):
            tokens = _prefix_tokens(number, count)
            tokens = tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE]
            events += stored(tokens, block_hashes(tokens), 8)
        data.append(publisher.messages(source, batches(events)))
    publisher.send(data)
