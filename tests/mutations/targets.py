"""Which files are mutated, and which tests must notice."""

from __future__ import annotations

from tests.mutations.mutate import Mutation, mutations
from tests.mutations.mutate_cpp import cpp_mutations

_CORE = (
    *(
        f"tests/router/index/test_{name}.py"
        for name in ("truth_table", "contract", "tiers", "dump", "sglang_samples")
    ),
    "tests/router/snapshots",
    "tests/router/index/test_core_equals_oracle.py",
)
"""The quickest first: one that fails ends the trial."""
_DECIDE = (
    "tests/router/scoring",
    "tests/router/replicas/test_load.py",
    "tests/router/routing",
    "tests/router/core/decide",
)
_MIRROR = ("tests/router/mirror", "tests/router/core/decide")
_GROUPS = ("tests/offload/groups", "tests/offload/test_cache_manager.py")

TARGETS: dict[str, tuple[str, ...]] = {
    # The hit rule, the wire, the state of a stream.
    "kvevents/hit_rule.py": ("tests/kvevents/test_hit_rule.py",),
    "kvevents/layout.py": ("tests/kvevents/test_layout.py", "tests/kvevents/test_hit_rule.py"),
    "kvevents/codec.py": ("tests/kvevents/test_codec.py", "tests/kvevents/test_wire_samples.py"),
    "kvevents/events.py": ("tests/kvevents/test_events.py", "tests/kvevents/test_codec.py"),
    "kvevents/sequence.py": (
        "tests/kvevents/test_sequence.py",
        "tests/kvevents/test_subscriber.py",
    ),
    "kvevents/stream_state.py": (
        "tests/kvevents/test_stream_state.py",
        "tests/kvevents/test_subscriber.py",
    ),
    "kvevents/hashing.py": ("tests/kvevents/test_hashing.py",),
    # The index.
    "router/index/layout_learner.py": _CORE,
    "router/index/hash_finder.py": _CORE,
    "router/index/dump.py": _CORE,
    # Routing and scoring.
    "router/routing/planner.py": ("tests/router/routing", "tests/router/observability"),
    "router/routing/recent_prefixes.py": ("tests/router/routing",),
    "router/routing/decision.py": ("tests/router/routing", "tests/router/observability"),
    "router/routing/dispatcher.py": ("tests/router/routing",),
    "router/replicas/load.py": ("tests/router/replicas/test_load.py", "tests/router/routing"),
    "router/routing/ranker.py": ("tests/router/routing", "tests/router/core/decide"),
    "router/routing/fleets.py": ("tests/router/routing", "tests/router/core/decide"),
    "router/scoring/policies.py": ("tests/router/scoring", "tests/contracts/test_policies.py"),
    "router/scoring/plug_ins.py": ("tests/router/scoring", "tests/router/routing"),
    "router/scoring/reasons.py": ("tests/router/scoring", "tests/contracts/test_policies.py"),
    **{
        f"router/core/decide/{name}.cpp": _DECIDE
        for name in ("decide", "hits", "least_delay", "load", "policies", "standings")
    },
    # What caches are doing and will evict next.
    **{
        f"router/core/mirror/{name}.cpp": _MIRROR
        for name in (
            "approximate",
            "cache",
            "eviction",
            "in_prefill",
            "layout",
            "mirror",
            "ownership",
            "prefix_tree",
            "prices",
            "traffic",
        )
    },
    "router/scoring/standings.py": ("tests/router/scoring",),
    "router/routing/replica_tokenizers.py": (
        "tests/router/routing",
        "tests/router/tokenize/test_tokenization.py",
    ),
    # The compiled index, and what stands between it and the rest.
    "router/index/index.py": _CORE,
    **{
        f"router/core/{name}": _CORE
        for name in (
            "binding/index.cpp",
            "index/apply.cpp",
            "index/apply_places.cpp",
            "index/apply_shared.cpp",
            "index/clear.cpp",
            "index/cohort.cpp",
            "index/copies.cpp",
            "index/copy_watch.cpp",
            "index/events.cpp",
            "index/found.cpp",
            "index/hit_rule.cpp",
            "index/index.cpp",
            "index/lane.cpp",
            "index/layout.cpp",
            "index/leaving.cpp",
            "index/lone.cpp",
            "index/lower_tiers.cpp",
            "index/marks.cpp",
            "index/match.cpp",
            "index/nodes.cpp",
            "index/places.cpp",
            "index/prompt.cpp",
            "index/source.cpp",
            "index/state.cpp",
            "index/tables.cpp",
            "index/tier.cpp",
            "index/units.cpp",
            "index/waiting.cpp",
            "index/bounded_map.hpp",
            "index/presence.hpp",
        )
    },
    # What surrounds a request.
    "router/overload/line.py": ("tests/router/overload",),
    "router/overload/room.py": ("tests/router/overload",),
    "router/overload/gate.py": ("tests/router/overload",),
    "router/overload/limits.py": ("tests/router/overload",),
    "router/overload/entrance.py": ("tests/router/overload", "tests/e2e/test_overload.py"),
    "router/http/gateway.py": (
        "tests/router/http/test_gateway.py",
        "tests/router/http",
        "tests/e2e/test_router.py",
        "tests/e2e/test_security.py",
    ),
    "router/proxy/attempts.py": ("tests/router/proxy",),
    "router/proxy/messages.py": ("tests/router/proxy",),
    "router/proxy/usage.py": ("tests/router/proxy",),
    "router/upstream/client.py": ("tests/router/upstream", "tests/router/proxy"),
    # What outlives a process, or comes from another.
    "router/board/slots.py": ("tests/router/board",),
    "router/board/valkey.py": ("tests/router/board",),
    "router/snapshots/beginning.py": ("tests/router/snapshots",),
    "router/snapshots/file.py": ("tests/router/snapshots",),
    "router/snapshots/peers.py": ("tests/router/snapshots",),
    "router/snapshots/records.py": ("tests/router/snapshots",),
    "router/snapshots/transfer.py": ("tests/router/snapshots",),
    "router/discovery/dns.py": ("tests/router/discovery",),
    "router/discovery/file.py": ("tests/router/discovery",),
    "router/discovery/keeper.py": ("tests/router/discovery",),
    "router/discovery/kubernetes.py": ("tests/router/discovery",),
    "router/discovery/kubernetes_api.py": ("tests/router/discovery",),
    "router/observability/readiness.py": ("tests/router/observability/test_readiness.py",),
    "router/observability/self_repair.py": ("tests/router/observability",),
    # The engine's cache.
    "offload/block_pool.py": (
        "tests/offload/test_block_pool.py",
        "tests/offload/test_cache_machine.py",
    ),
    "offload/cached_blocks.py": ("tests/offload/test_cached_blocks.py",),
    "offload/coordinator.py": (
        "tests/offload/test_coordinator.py",
        "tests/offload/test_cache_manager.py",
    ),
    "offload/event_log.py": ("tests/offload/test_event_log.py",),
    "offload/groups/base.py": _GROUPS,
    "offload/groups/full.py": _GROUPS,
    "offload/groups/sliding_window.py": _GROUPS,
    "offload/groups/chunked_local.py": _GROUPS,
    "offload/groups/mamba.py": _GROUPS,
    "offload/transfer/plan.py": ("tests/offload/transfer",),
}
"""Each file with the tests that mirror it; they run in this order until one fails."""


def mutations_of(path: str, text: str) -> list[Mutation]:
    """Every mutation of a target.

    Args:
        path: One of `TARGETS`.
        text: Its source.
    """
    return (mutations if path.endswith(".py") else cpp_mutations)(path, text)
