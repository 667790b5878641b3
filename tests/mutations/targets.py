"""Which files are mutated, and which tests must notice."""

from __future__ import annotations

from tests.mutations.mutate import Mutation, mutations
from tests.mutations.mutate_cpp import cpp_mutations

_CORE = (
    *(
        f"tests/router/index/test_{name}.py"
        for name in ("truth_table", "contract", "tiers", "dump", "sglang_samples")
    ),
    "tests/router/feed",
    "tests/router/index/test_core_equals_oracle.py",
)
"""The quickest first: one that fails ends the trial."""
_DECIDE = (
    "tests/router/policies",
    "tests/router/fleet/test_load.py",
    "tests/router/routing",
    "tests/router/core/decide",
)
_MIRROR = ("tests/router/index", "tests/router/core/decide")
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
    "kvevents/stream_repair.py": (
        "tests/kvevents/test_stream_repair.py",
        "tests/kvevents/test_subscriber.py",
    ),
    "kvevents/hashing.py": ("tests/kvevents/test_hashing.py",),
    # The index.
    "router/index/layout_learner.py": _CORE,
    "router/index/hash_finder.py": _CORE,
    # Routing and scoring.
    "router/routing/planner.py": (
        "tests/router/routing",
        "tests/router/telemetry",
        "tests/router/core/decide",
    ),
    "router/routing/recent_prefixes.py": ("tests/router/routing",),
    "router/routing/booking.py": ("tests/router/routing", "tests/router/telemetry"),
    "router/routing/decision.py": ("tests/router/routing", "tests/router/telemetry"),
    "router/routing/dispatcher.py": ("tests/router/routing",),
    "router/fleet/load.py": ("tests/router/fleet/test_load.py", "tests/router/routing"),
    "router/routing/fleets.py": ("tests/router/routing", "tests/router/core/decide"),
    "router/policies/policies.py": ("tests/router/policies", "tests/contracts/test_policies.py"),
    "router/policies/plug_ins.py": ("tests/router/policies", "tests/router/routing"),
    "router/policies/reasons.py": ("tests/router/policies", "tests/contracts/test_policies.py"),
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
    "router/policies/standings.py": ("tests/router/policies",),
    "router/routing/replica_tokenizers.py": (
        "tests/router/routing",
        "tests/router/prompt/test_tokenization.py",
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
    "router/fleet/line.py": ("tests/router/fleet",),
    "router/fleet/room.py": ("tests/router/fleet",),
    "router/fleet/gate.py": ("tests/router/fleet",),
    "router/fleet/limits.py": ("tests/router/fleet",),
    "router/fleet/entrance.py": ("tests/router/fleet", "tests/e2e/test_overload.py"),
    "router/doors/http/gateway.py": (
        "tests/router/doors/http/test_gateway.py",
        "tests/router/doors/http",
        "tests/e2e/test_router.py",
        "tests/e2e/test_security.py",
    ),
    "router/plane/attempts.py": ("tests/router/plane",),
    "router/plane/proxied_messages.py": ("tests/router/plane",),
    "router/plane/usage.py": ("tests/router/plane",),
    "router/fleet/client.py": ("tests/router/fleet", "tests/router/plane"),
    "router/fleet/probes.py": ("tests/router/fleet",),
    # What outlives a process, or comes from another.
    "router/sharing/slots.py": ("tests/router/sharing",),
    "router/sharing/valkey.py": ("tests/router/sharing",),
    "router/feed/snapshot_file.py": ("tests/router/feed",),
    "router/feed/snapshot_peers.py": ("tests/router/feed",),
    "router/feed/snapshot_records.py": ("tests/router/feed", "tests/router/index/test_dump.py"),
    "router/fleet/discovery/dns.py": ("tests/router/fleet/discovery",),
    "router/fleet/discovery/file.py": ("tests/router/fleet/discovery",),
    "router/fleet/discovery/keeper.py": ("tests/router/fleet/discovery",),
    "router/fleet/discovery/kubernetes.py": ("tests/router/fleet/discovery",),
    "router/fleet/discovery/kubernetes_api.py": ("tests/router/fleet/discovery",),
    "router/telemetry/readiness.py": ("tests/router/telemetry/test_readiness.py",),
    "router/telemetry/self_repair.py": ("tests/router/telemetry",),
    "router/fleet/quiet_moments.py": ("tests/router/telemetry",),
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
    "offload/groups/local.py": _GROUPS,
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
