"""The ports of an engine: documents, examples, manifests and code name the same ones, and the chart
lets exactly these through."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvevents import PublisherConfig
from tests.deploy.files import (
    ENGINE_PORTS,
    EVENT_PORT,
    HTTP_PORT,
    REPLAY_PORT,
    ROOT,
    load,
)
from tests.deploy.test_chart import BASIC, CHART, rendered

SHOWN_RANKS = 2
"""The most data-parallel ranks that an example shows."""
EVENT_PORTS = set(range(EVENT_PORT, EVENT_PORT + SHOWN_RANKS))
REPLAY_PORTS = set(range(REPLAY_PORT, REPLAY_PORT + SHOWN_RANKS))
ENDPOINT = re.compile(r"(?:((?:[a-z]+[_-])?endpoint)\W+)?tcp://[^\s\"'`/:]+:(\d{4,5})")
"""An endpoint's name, where it has one (`replay_endpoint`, `events-endpoint`), and its port."""
PORTS_BY_KIND = {
    "": EVENT_PORTS | REPLAY_PORTS,
    "endpoint": EVENT_PORTS,
    "events-endpoint": EVENT_PORTS,
    "replay_endpoint": REPLAY_PORTS,
    "replay-endpoint": REPLAY_PORTS,
}


def texts() -> Iterator[Path]:
    """Every file that a user reads or copies from."""
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    for directory in ("docs", "examples", "deploy", "kvevents", "router", "offload"):
        for path in (ROOT / directory).rglob("*"):
            if path.suffix in {"", ".md", ".py", ".pyi", ".yaml", ".yml", ".service"}:
                yield from [path] if path.is_file() else []


def endpoints() -> Iterator[tuple[str, str, int]]:
    """Place, kind and port of every endpoint that is written anywhere; no release of an engine has
    one for snapshots."""
    for path in texts():
        for kind, port in ENDPOINT.findall(path.read_text(encoding="utf-8")):
            if kind != "snapshot_endpoint":
                yield str(path.relative_to(ROOT)), kind, int(port)


def policies(directory: Path, values: dict[str, Any]) -> list[set[int]]:
    """The ports of the engines by the router's policy, and by that of the engines themselves."""
    guarded = {**BASIC, "engines": values, "networkPolicy": {"guardEngines": True}}
    router, engines = (
        each["spec"] for each in rendered(directory, guarded) if each["kind"] == "NetworkPolicy"
    )
    rules = (router["egress"][0], engines["ingress"][0])
    return [{port["port"] for port in rule["ports"]} for rule in rules]


def test_every_endpoint_in_the_repository_has_the_port_of_its_kind() -> None:
    """One example with another port is copied, and a policy made for the others cuts it off."""
    found = list(endpoints())
    assert {"README.md", "deploy/Dockerfile", "docs/engines.md"} <= {place for place, *_ in found}
    assert [each for each in found if each[2] not in PORTS_BY_KIND[each[1]]] == []
    assert PublisherConfig().endpoint.endswith(f":{EVENT_PORT}")


def test_the_chart_lets_through_what_the_engines_command_lines_name(tmp_path: Path) -> None:
    """A router whose replay is cut off starts with nothing, and every lost batch stays lost."""
    assert policies(tmp_path, {}) == [ENGINE_PORTS, ENGINE_PORTS]
    shown = {port for *_, port in endpoints()}
    for ports in policies(tmp_path, {"dataParallelSize": SHOWN_RANKS}):
        assert shown <= ports


def test_every_data_parallel_rank_adds_its_ports(tmp_path: Path) -> None:
    """Each rank publishes by itself: the second of two had neither events nor replay."""
    ranks = range(4)
    expected = {HTTP_PORT, *(base + rank for base in (EVENT_PORT, REPLAY_PORT) for rank in ranks)}
    assert policies(tmp_path, {"dataParallelSize": 4}) == [expected, expected]
    own = {"port": 8080, "eventPorts": [7000, 7001], "dataParallelSize": 2}
    assert policies(tmp_path, own) == [{8080, 7000, 7001, 7002}] * 2


def test_the_firewall_of_the_document_is_that_of_the_chart() -> None:
    """It is what an operator without Kubernetes copies."""
    document = re.sub(r"\s+", " ", (ROOT / "docs/deployment.md").read_text())
    named = re.search(r"Let the router reach ports (\d+), (\d+) and (\d+) of each engine", document)
    assert named
    assert [int(port) for port in named.groups()] == [HTTP_PORT, EVENT_PORT, REPLAY_PORT]
    engines = load(CHART / "values.yaml")["engines"]
    assert [engines["port"], *engines["eventPorts"]] == [HTTP_PORT, EVENT_PORT, REPLAY_PORT]
