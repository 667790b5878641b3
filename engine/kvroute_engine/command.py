"""`kvroute engine`: one replica of the small engine."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvevents.curve import CurveServer, read_clients, read_keys
from kvevents.errors import CurveError, KVEventsError
from kvevents.publisher import ZmqEventPublisher
from kvevents.sealing import HashKey, read_hash_key
from kvroute_engine.core.build import EngineConfig, build_engine
from kvroute_engine.core.engine import Engine
from kvroute_engine.core.presets import preset_names
from kvroute_engine.core.serving_order import SchedulingPolicy
from kvroute_engine.core.time_model import TimeModel
from kvroute_engine.http.api import ApiConfig
from kvroute_engine.http.responses import KVEventEndpoint, ServedModel
from kvroute_engine.http.server import EngineServerConfig
from kvroute_engine.http.server import run as run_server
from kvroute_engine.http.tokenizer import ByteTokenizer, Tokenizer
from kvroute_engine.http.tokenizer_files import FileTokenizer
from offload.errors import CacheConfigError, OffloadError
from offload.tiers import TierConfig, tier_names

EXIT_USAGE = 2
_DEFAULTS = EngineConfig()
_TIMES = TimeModel()
_SERVER = EngineServerConfig()


def add_to(commands: Any) -> None:
    """Add the command to the subparsers of `kvroute`."""
    parser = commands.add_parser(
        "engine",
        help="one replica of a small engine: a real KV cache, random weights or none",
        description="Serves vLLM's HTTP API and KV events until SIGTERM, then finishes what it has "
        "begun.",
    )
    _add_model(parser.add_argument_group("model"))
    cache = parser.add_argument_group("cache")
    _add_cache(cache)
    _add_tiers(cache)
    _add_events(parser.add_argument_group("KV events"))
    _add_server(parser.add_argument_group("server"))
    _add_simulation(parser.add_argument_group("with --simulate"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Build the engine and serve it; returns the exit code."""
    try:
        tokenizer: Tokenizer = (
            FileTokenizer.load(arguments.tokenizer) if arguments.tokenizer else ByteTokenizer()
        )
        config = _engine_config(arguments, tokenizer)
        engine = build_engine(config)
        return run_server(
            engine, tokenizer, _api_config(arguments, config, engine), _server_config(arguments)
        )
    except (OffloadError, KVEventsError) as error:
        print(f"kvroute engine: {error}", file=sys.stderr)
        return EXIT_USAGE


def _whole(low: int, high: int = 2**40) -> Callable[[str], int]:
    """Make the type of an option that takes a whole number from *low* to *high*."""

    def parse(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} must be a whole number from {low} to {high}"
            )
        return int(text)

    return parse


def _interval(text: str) -> int | None:
    return None if text == "dense" else _whole(0)(text)


def _number(low: float, high: float = 1e18) -> Callable[[str], float]:
    """Make the type of an option that takes a number from *low* to *high*."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} must be a number from {low:g} to {high:g}"
            )
        return value

    return parse


# --- options --------------------------------------------------------------------------------------


def _add_model(group: Any) -> None:
    group.add_argument(
        "--preset",
        default=_DEFAULTS.preset,
        metavar="NAME",
        help=f"one of {', '.join(preset_names())}",
    )
    group.add_argument(
        "--simulate",
        action="store_true",
        help="no tensors: a real cache, and the time a model would take",
    )
    group.add_argument("--device", help="cpu, cuda, ...; by default a GPU if there is one")
    group.add_argument("--seed", type=_whole(0), default=_DEFAULTS.seed, help="seeds the weights")
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what clients call the model; default: the preset's name",
    )
    group.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME",
        help="a LoRA adapter, in name only; repeatable",
    )
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="a tokenizer.json or its directory; by default bytes are tokens",
    )
    _add_limits(group)


def _add_limits(group: Any) -> None:
    group.add_argument(
        "--max-model-len", type=_whole(1), metavar="TOKENS", help="prompt and output together"
    )
    group.add_argument(
        "--max-num-seqs",
        type=_whole(1),
        default=_DEFAULTS.max_num_seqs,
        metavar="N",
        help="requests in one step",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=_whole(1),
        default=_DEFAULTS.max_num_batched_tokens,
        metavar="TOKENS",
        help="in one step",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=[policy.value for policy in SchedulingPolicy],
        default=_DEFAULTS.scheduling_policy.value,
        help="who goes first: who came first, who has the lowest priority number, or who has the "
        "least left to compute, running prompts among them; see docs/engine.md, Order",
    )


def _add_cache(group: Any) -> None:
    group.add_argument(
        "--num-blocks",
        type=_whole(2),
        default=_DEFAULTS.num_blocks,
        metavar="N",
        help="blocks of the cache, shared by all groups",
    )
    group.add_argument(
        "--block-size", type=_whole(1), metavar="TOKENS", help="default: the preset's"
    )
    group.add_argument(
        "--no-prefix-caching", action="store_true", help="compute every prompt from scratch"
    )
    group.add_argument(
        "--retention-interval",
        type=_interval,
        default=_DEFAULTS.retention_interval,
        metavar="TOKENS",
        help="windows and states stay findable at every such length, or everywhere (dense); "
        "default: only where prompts end or part, as in vLLM; see docs/offloading.md, Retention",
    )


def _add_tiers(group: Any) -> None:
    group.add_argument(
        "--cpu-blocks",
        type=_whole(0),
        default=_DEFAULTS.cpu_blocks,
        metavar="N",
        help="blocks of a tier in memory",
    )
    group.add_argument(
        "--cpu-cache-policy",
        default=_DEFAULTS.cpu_cache_policy,
        metavar="NAME",
        help="eviction policy of the tier in memory",
    )
    group.add_argument(
        "--disk-directory", type=Path, metavar="PATH", help="where a tier on disk keeps its blocks"
    )
    group.add_argument(
        "--disk-bytes",
        type=_whole(1),
        default=_DEFAULTS.disk_bytes,
        metavar="N",
        help="size of the tier on disk",
    )
    group.add_argument(
        "--tier",
        action="append",
        default=[],
        nargs="+",
        metavar=("NAME", "OPTION=VALUE"),
        help=f"a lower tier with its options: {', '.join(tier_names())}; repeatable, the fastest "
        "first; see docs/offloading.md, Tiers by name",
    )
    group.add_argument(
        "--no-promote",
        action="store_true",
        help="do not store in faster tiers what was loaded from slower ones",
    )


def _add_events(group: Any) -> None:
    group.add_argument(
        "--kv-events-endpoint",
        metavar="ADDRESS",
        help="such as tcp://127.0.0.1:5557; no events if left out",
    )
    group.add_argument(
        "--kv-events-replay-endpoint",
        metavar="ADDRESS",
        help="where subscribers ask for batches they lost",
    )
    group.add_argument(
        "--kv-events-keys",
        type=Path,
        metavar="FILE",
        help="encrypt both: the file NAME.key_secret that `kvroute keys NAME` made",
    )
    group.add_argument(
        "--kv-events-hash-key",
        type=Path,
        metavar="FILE",
        help="announce blocks without token ids, under this key: the file NAME.hash_key that "
        "`kvroute keys --hash NAME` made",
    )
    group.add_argument(
        "--kv-events-clients",
        type=Path,
        metavar="DIRECTORY",
        help="with the public keys of those who may subscribe (default: all who know this one's)",
    )
    group.add_argument("--kv-events-topic", default=_DEFAULTS.kv_events_topic, metavar="TOPIC")
    group.add_argument(
        "--data-parallel-rank",
        type=_whole(0, 65_535),
        default=0,
        metavar="RANK",
        help="added to both ports",
    )


def _add_server(group: Any) -> None:
    group.add_argument("--host", default=_SERVER.host)
    group.add_argument(
        "--port", type=_whole(0, 65_535), default=_SERVER.port, help="0 lets the system choose"
    )
    group.add_argument(
        "--grace-s",
        type=_number(0, 86_400),
        default=_SERVER.grace_s,
        metavar="S",
        help="how long requests in flight may run after SIGTERM",
    )
    group.add_argument(
        "--log-level", default=_SERVER.log_level, choices=("debug", "info", "warning", "error")
    )
    group.add_argument(
        "--enable-faults",
        action="store_true",
        help="POST /faults: hang, slow, crash, restart, drop_events",
    )


def _add_simulation(group: Any) -> None:
    rates = (
        "--prefill-tokens-per-s",
        "--decode-tokens-per-s",
        "--step-overhead-s",
        "--transfer-bytes-per-s",
        "--slowdown",
    )
    for option in rates:
        default = getattr(_TIMES, option.removeprefix("--").replace("-", "_"))
        low = 0 if option == "--step-overhead-s" else 1e-9
        group.add_argument(
            option, type=_number(low), default=default, metavar="X", help=f"default {default:g}"
        )


# --- configuration --------------------------------------------------------------------------------


def _engine_config(arguments: argparse.Namespace, tokenizer: Tokenizer) -> EngineConfig:
    return EngineConfig(
        preset=arguments.preset,
        simulate=arguments.simulate,
        model_name=arguments.served_model_name or arguments.preset,
        num_blocks=arguments.num_blocks,
        block_size=arguments.block_size,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_num_seqs=arguments.max_num_seqs,
        max_model_len=arguments.max_model_len,
        scheduling_policy=SchedulingPolicy(arguments.scheduling_policy),
        vocab_size=tokenizer.vocab_size,  # so every token the model chooses has a text
        eos_token_id=-1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id,
        seed=arguments.seed,
        enable_caching=not arguments.no_prefix_caching,
        retention_interval=arguments.retention_interval,
        cpu_blocks=arguments.cpu_blocks,
        cpu_cache_policy=arguments.cpu_cache_policy,
        disk_directory=arguments.disk_directory,
        disk_bytes=arguments.disk_bytes,
        tiers=tuple(_tier(*words) for words in arguments.tier),
        promote=not arguments.no_promote,
        kv_events_endpoint=arguments.kv_events_endpoint,
        kv_events_replay_endpoint=arguments.kv_events_replay_endpoint,
        kv_events_curve=_curve(arguments),
        kv_events_hash_key=_hash_key(arguments),
        kv_events_topic=arguments.kv_events_topic,
        data_parallel_rank=arguments.data_parallel_rank,
        device=arguments.device,
        time_model=_time_model(arguments),
    )


def _tier(name: str, *options: str) -> TierConfig:
    pairs = [option.partition("=") for option in options]
    for option, (key, equals, _) in zip(options, pairs, strict=True):
        if not (key and equals):
            raise CacheConfigError(f"--tier {name}: {option[:40]!r} must be OPTION=VALUE")
    return TierConfig(name, {key: value for key, _, value in pairs})


def _time_model(arguments: argparse.Namespace) -> TimeModel:
    return TimeModel(
        prefill_tokens_per_s=arguments.prefill_tokens_per_s,
        decode_tokens_per_s=arguments.decode_tokens_per_s,
        step_overhead_s=arguments.step_overhead_s,
        transfer_bytes_per_s=arguments.transfer_bytes_per_s,
        slowdown=arguments.slowdown,
    )


def _api_config(arguments: argparse.Namespace, config: EngineConfig, engine: Engine) -> ApiConfig:
    publisher = engine.publisher
    return ApiConfig(
        model=_served_model(arguments, config, engine),
        version=version("kvroute"),
        event_endpoints=_event_endpoints(config, engine),
        enable_faults=arguments.enable_faults,
        drop_events=publisher.leave_out if isinstance(publisher, ZmqEventPublisher) else None,
    )


def _served_model(
    arguments: argparse.Namespace, config: EngineConfig, engine: Engine
) -> ServedModel:
    return ServedModel(
        name=config.model_name or config.preset,
        vocab_size=engine.model.vocab_size,
        max_model_len=engine.model.max_model_len,
        block_size=engine.model.block_size,
        num_blocks=engine.cache.config.num_blocks,
        enable_prefix_caching=config.enable_caching,
        created=int(time.time()),
        adapters=tuple(arguments.lora),
        group_kinds=tuple(group.kind.value for group in engine.cache.config.layout.groups),
        scheduling_policy=config.scheduling_policy.value,
    )


def _hash_key(arguments: argparse.Namespace) -> HashKey | None:
    """Return the key for blocks without token ids, if there is one.

    Raises:
        HashKeyError: Its file cannot be used.
    """
    path = arguments.kv_events_hash_key
    return None if path is None else read_hash_key(path)


def _curve(arguments: argparse.Namespace) -> CurveServer | None:
    """Return the keys that encrypt the events.

    Raises:
        CurveError: A file cannot be used.
    """
    keys, clients = arguments.kv_events_keys, arguments.kv_events_clients
    if keys is None:
        if clients is not None:
            raise CurveError("--kv-events-clients: there must be --kv-events-keys for that")
        return None
    return CurveServer(read_keys(keys), None if clients is None else read_clients(clients))


def _event_endpoints(config: EngineConfig, engine: Engine) -> dict[int, KVEventEndpoint]:
    publisher = engine.publisher
    if not isinstance(publisher, ZmqEventPublisher):
        return {}
    topic = config.kv_events_topic
    endpoint = KVEventEndpoint(publisher.endpoint, publisher.replay_endpoint, topic)
    return {config.data_parallel_rank: endpoint}


def _server_config(arguments: argparse.Namespace) -> EngineServerConfig:
    return EngineServerConfig(
        arguments.host, arguments.port, arguments.grace_s, arguments.log_level
    )
