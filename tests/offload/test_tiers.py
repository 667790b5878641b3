"""Tiers by name: built in, installed, and configured wrongly."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvevents.errors import EndpointError
from kvevents.events import CPU, STORAGE
from kvroute_engine.core.build import EngineConfig, build_engine
from kvroute_engine.core.engine import Engine
from kvroute_engine.core.requests import EngineRequest, SamplingParams
from kvroute_engine.core.simulated import SimulatedBackend
from kvroute_engine.core.time_model import TimeModel, VirtualClock
from offload.cpu.manager import CPUOffloadingManager
from offload.cpu.policies.arc import ARCPolicy
from offload.errors import CacheConfigError
from offload.fs.manager import FileOffloadingManager
from offload.reuse_filter import ReuseFilter
from offload.tiers import TierConfig, TierHost, create_tiers, tier_names
from tests.offload import tier_plug_in
from tests.support.cache_layouts import GROUPS


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    with tier_plug_in.installed(tmp_path):
        yield tmp_path


def host_of(name: str = "full and states", enable_events: bool = False) -> TierHost:
    groups = GROUPS[name]
    backend = SimulatedBackend(TimeModel(), VirtualClock(), 256, 1024)
    return TierHost(groups, [1024] * len(groups), "weights", enable_events, backend)


def engine_of(*tiers: TierConfig, **settings: Any) -> Engine:
    config = EngineConfig(preset="full", simulate=True, tiers=tiers, **settings)
    return build_engine(config, VirtualClock())


# --- built in -------------------------------------------------------------------------------------


def test_options_may_be_numbers_or_their_text(tmp_path: Path) -> None:
    """A command line has only text."""
    cpu: Mapping[str, Any]
    for cpu in ({"num_blocks": 7, "cache_policy": "arc"}, {"num_blocks": "7"}):
        memory, disk = create_tiers(
            [TierConfig("cpu", cpu), TierConfig("fs", {"directory": str(tmp_path)})], host_of()
        )
        assert isinstance(memory.tier.manager, CPUOffloadingManager)
        assert memory.tier.manager.num_blocks == 7
        is_arc = isinstance(memory.tier.manager._policy, ARCPolicy)
        assert is_arc is ("cache_policy" in cpu)
        assert isinstance(disk.tier.manager, FileOffloadingManager)
        assert disk.tier.manager.max_bytes == 1 << 30
        assert (memory.tier.medium, disk.tier.medium) == (CPU, STORAGE)


def test_offloaded_blocks_may_be_larger_where_the_kind_allows_it(tmp_path: Path) -> None:
    """States are not adjacent; and the files hold the larger blocks."""
    options = {"directory": tmp_path, "blocks_per_offloaded_block": "4"}
    (made,) = create_tiers([TierConfig("fs", options)], host_of())
    assert made.tier.sizes == (4, 1)
    assert made.spec._store.payload_bytes == (4096, 1024)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("publishes", "blocks", "expected"), [(False, 1, False), (True, 1, True), (False, 2, True)]
)
def test_a_tier_reports_events_only_if_someone_takes_them(
    publishes: bool, blocks: int, expected: bool
) -> None:
    """The engine that publishes, or a tier that finds its larger blocks by them."""
    options = {"num_blocks": 4, "blocks_per_offloaded_block": blocks}
    (made,) = create_tiers([TierConfig("cpu", options)], host_of(enable_events=publishes))
    assert made.tier.manager.enable_events is expected


def test_every_built_in_tier_can_be_put_behind_the_reuse_filter(tmp_path: Path) -> None:
    """Most prompts' tails never recur, wherever they are stored."""
    options: dict[str, dict[str, Any]] = {
        "cpu": {"num_blocks": 4},
        "fs": {"directory": tmp_path},
    }
    for name, own in options.items():
        filtered = {**own, "min_uses": "3", "max_tracked": 50}
        (made,) = create_tiers([TierConfig(name, filtered)], host_of())
        assert isinstance(made.tier.manager, ReuseFilter)
        assert (made.tier.manager.min_uses, made.tier.manager.max_tracked) == (3, 50)


# --- wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("CPU", {}, r"offload tier: 'CPU' is unknown; did you mean cpu\? known: cpu, fs, .*peer"),
        ("cpu", {}, "cpu tier: num_blocks is missing"),
        (
            "cpu",
            {"num_block": 4},
            r"cpu tier: option 'num_block' is unknown; did you mean num_blocks\? known: .*min_uses",
        ),
        ("cpu", {"num_blocks": "many"}, "cpu tier: num_blocks 'many': expected `int`"),
        ("cpu", {"num_blocks": 0}, "cpu tier: num_blocks '0': expected `int` >= 1"),
        ("cpu", {"num_blocks": 4, "cache_policy": "lur"}, "cache_policy: 'lur' is unknown; did"),
        ("fs", {"directory": 5}, "fs tier: directory '5': "),
        ("fs", {"directory": "/tmp", "max_bytes": 10}, "max_bytes 10 must hold a block"),
        ("peer", {"num_blocks": 3, "per": "x"}, r"peer tier: option 'per' .*did you mean peer\?"),
        ("half", {}, "made Half, which lacks create_worker, close"),
    ],
)
def test_the_error_of_a_wrong_tier_says_place_value_and_rule(
    installed: Path, name: str, options: dict[str, Any], message: str
) -> None:
    """It surfaces at the start, to the operator who wrote it."""
    with pytest.raises(CacheConfigError, match=message):
        create_tiers([TierConfig(name, options)], host_of())


def test_if_a_tier_cannot_be_made_those_before_it_are_closed(installed: Path) -> None:
    """Their threads and their locks on directories would outlive the failure."""
    peer = {"num_blocks": 4, "peer": "a"}
    with pytest.raises(RuntimeError, match="no peer"):
        create_tiers(
            [TierConfig("peer", peer), TierConfig("peer", {**peer, "fails": "manager"})], host_of()
        )
    assert [spec.closed for spec in sys.modules["kvroute_peer_tier"].made] == [1, 1]


@pytest.mark.parametrize("option", [{"kv_events_endpoint": "nonsense"}, {"second": True}])
def test_an_engine_that_cannot_be_made_closes_its_tiers(
    installed: Path, option: dict[str, Any]
) -> None:
    """Another attempt in the same process would find the directory in use."""
    peer = TierConfig("peer", {"num_blocks": 4, "peer": "a"})
    tiers = (peer, peer) if option.pop("second", False) else (peer,)
    with pytest.raises((EndpointError, CacheConfigError)):
        engine_of(*tiers, **option)
    assert [spec.closed for spec in sys.modules["kvroute_peer_tier"].made] == [1] * len(tiers)


# --- a plug-in in an engine -----------------------------------------------------------------------


def test_a_built_in_tier_cannot_be_replaced_by_a_plug_in(installed: Path) -> None:
    """A package must not change a tier by merely being installed."""
    assert tier_names() == ["cpu", "fs", "p2p", "half", "peer"]
    (made,) = create_tiers([TierConfig("cpu", {"num_blocks": 4})], host_of())
    assert isinstance(made.tier.manager, CPUOffloadingManager)


def generate(engine: Engine, name: str, prompt: list[int], **fields: Any) -> int:
    """Finish one request and all copies; return its cached tokens."""
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.add_request(EngineRequest(name, prompt, sampling, **fields))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs[0].num_cached_tokens


def test_an_engine_uses_a_tier_of_another_package_and_tells_it_what_requests_say(
    installed: Path,
) -> None:
    """The whole way: named in the configuration, asked per request, loaded from, closed."""
    engine = engine_of(TierConfig("peer", {"num_blocks": 100, "peer": "10.0.0.7"}), num_blocks=100)
    shared, private = list(range(64)), list(range(64, 128))
    generate(engine, "shared", shared, kv_transfer_params={"share": True})
    generate(engine, "private", private, kv_transfer_params={"share": False})
    assert engine.cache.reset()
    assert generate(engine, "shared again", shared) == 64
    assert generate(engine, "private again", private) == 0
    engine.close()
    (spec,) = sys.modules["kvroute_peer_tier"].made
    assert (spec.options.peer, spec.closed) == ("10.0.0.7", 1)


def test_tiers_of_all_kinds_stack_in_the_order_of_their_configuration(
    installed: Path, tmp_path: Path
) -> None:
    """The short options first, then the named ones."""
    engine = engine_of(
        TierConfig("peer", {"num_blocks": 100, "peer": "a", "blocks_per_offloaded_block": 2}),
        cpu_blocks=10,
        disk_directory=tmp_path,
    )
    assert [made.tier.medium for made in engine.tiers] == [CPU, STORAGE, "PEER"]
    engine.close()
