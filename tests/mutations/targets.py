"""Which files are mutated, and which tests must notice."""

from __future__ import annotations

_INDEX = (
    "tests/router/index/reference",
    *(
        f"tests/router/index/test_{name}.py"
        for name in (
            "truth_table",
            "tiers",
            "shared_stores",
            "sglang_samples",
            "dump",
            "contract",
            "properties",
        )
    ),
)
"""Without those that build and run the compiled index: no mutation is tried in that."""
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
    "router/index/reference/source.py": _INDEX,
    "router/index/reference/block_table.py": _INDEX,
    "router/index/reference/placing.py": _INDEX,
    "router/index/reference/index.py": _INDEX,
    "router/index/reference/keys.py": _INDEX,
    "router/index/reference/layout_learner.py": _INDEX,
    "router/index/reference/hash_finder.py": _INDEX,
    "router/index/dump.py": _INDEX,
    # Routing and scoring.
    "router/routing/planner.py": ("tests/router/routing", "tests/router/observability"),
    "router/routing/recent_prefixes.py": ("tests/router/routing",),
    "router/routing/decision.py": ("tests/router/routing", "tests/router/observability"),
    "router/routing/dispatcher.py": ("tests/router/routing",),
    "router/replicas/load.py": ("tests/router/replicas/test_load.py", "tests/router/routing"),
    "router/scoring/policies.py": ("tests/router/scoring", "tests/contracts/test_policies.py"),
    "router/scoring/ranking.py": ("tests/router/scoring", "tests/contracts/test_policies.py"),
    "router/scoring/delay.py": ("tests/router/scoring", "tests/contracts/test_policies.py"),
    # What caches are doing and will evict next.
    "router/mirror/mirror.py": ("tests/router/mirror",),
    "router/mirror/ownership.py": ("tests/router/mirror",),
    "router/mirror/prefix_tree.py": ("tests/router/mirror",),
    "router/mirror/traffic.py": ("tests/router/mirror",),
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
