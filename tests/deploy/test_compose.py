"""The compose file: everything it names exists, and its parts agree on addresses, ports and
commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from router.config.schema import RouterConfig
from tests.deploy.dockerfile import stages
from tests.deploy.files import (
    CONFIG_PATH,
    DEPLOY,
    ENGINE_COMMAND,
    ENGINE_PORTS,
    KEYS,
    PROMETHEUS,
    load,
    succeeds,
    tool,
    version,
)

COMPOSE = load(DEPLOY / "compose.yaml")
SERVICES: dict[str, Any] = COMPOSE["services"]
ENGINES = [name for name in SERVICES if name.startswith("engine")]
ROUTER = RouterConfig.load(DEPLOY / "compose/kvroute.yaml", KEYS)


def mounts(name: str) -> dict[str, str]:
    """Path in the container -> path or volume outside."""
    pairs = [volume.split(":") for volume in SERVICES[name].get("volumes", [])]
    return {parts[1]: parts[0] for parts in pairs}


def test_compose_itself_accepts_the_file() -> None:
    """It knows every key. This needs the plug-in, but no daemon."""
    docker = tool("docker", "docker.io and docker-compose")
    if "compose" not in succeeds(docker, "--help"):
        pytest.skip("docker has no plug-in compose")
    compose = (docker, "compose", "-f", str(DEPLOY / "compose.yaml"))
    succeeds("env", "OPERATOR_KEY=x", *compose, "config", "--quiet")


def test_there_are_a_router_three_engines_prometheus_and_grafana() -> None:
    """One file shows the whole system."""
    assert set(SERVICES) == {"router", "engine-a", "engine-b", "engine-c", "prometheus", "grafana"}


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned_and_those_of_ours_can_be_built(name: str) -> None:
    """Our images have this version as their tag; the others are pinned by digest."""
    service = SERVICES[name]
    if "build" not in service:
        assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+@sha256:[0-9a-f]{64}", service["image"])
        return
    tag = service["image"].rpartition(":")[2]
    assert tag == version()
    assert (DEPLOY / service["build"]["context"]).resolve() == DEPLOY.parent
    assert (DEPLOY.parent / service["build"]["dockerfile"]).is_file()
    assert service["build"]["target"] in stages(DEPLOY / "Dockerfile")


@pytest.mark.parametrize("name", SERVICES)
def test_only_this_machine_reaches_published_ports(name: str) -> None:
    """Prompts need no key, and engines are not published at all."""
    ports = SERVICES[name].get("ports", [])
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert not (name in ENGINES and ports)


@pytest.mark.parametrize("name", SERVICES)
def test_everything_that_is_mounted_exists(name: str) -> None:
    """Docker makes an empty directory of a path that does not."""
    for outside in mounts(name).values():
        assert (
            (DEPLOY / outside).exists()
            if outside.startswith(".")
            else outside in COMPOSE["volumes"]
        ), outside


def test_the_router_finds_its_configuration_and_listens_where_it_is_published() -> None:
    """The file is mounted, the port published."""
    assert "command" not in SERVICES["router"], "the image's own names the path"
    assert (DEPLOY / mounts("router")[CONFIG_PATH]).resolve() == DEPLOY / "compose/kvroute.yaml"
    assert SERVICES["router"]["ports"] == [f"127.0.0.1:{ROUTER.server.port}:{ROUTER.server.port}"]
    assert ROUTER.server.host == "0.0.0.0"


def test_the_operator_must_choose_a_key() -> None:
    """In a container, nobody comes from loopback."""
    assert ROUTER.server.operator_api_key is not None
    assert SERVICES["router"]["environment"]["OPERATOR_KEY"].startswith("${OPERATOR_KEY:?")


def test_the_routers_replicas_are_the_engines() -> None:
    """They have the names and the port of the engines."""
    assert {replica.id for replica in ROUTER.replicas} == set(ENGINES)
    for replica in ROUTER.replicas:
        assert urlsplit(replica.url).netloc == f"{replica.id}:8000"


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_runs_the_engines_command_and_exposes_its_ports(name: str) -> None:
    """HTTP, events and their replay."""
    assert SERVICES[name]["command"] == ENGINE_COMMAND
    assert {int(port) for port in SERVICES[name]["expose"]} == ENGINE_PORTS


@pytest.mark.parametrize("name", ["router", *ENGINES])
def test_our_containers_may_do_nothing_that_they_do_not_need(name: str) -> None:
    """They can only write to /tmp."""
    service = SERVICES[name]
    assert (service["read_only"], service["cap_drop"], service["tmpfs"]) == (
        True,
        ["ALL"],
        ["/tmp"],
    )
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_running_requests_have_the_time_that_the_router_gives_them() -> None:
    """Docker kills them after it."""
    assert (
        int(SERVICES["router"]["stop_grace_period"].removesuffix("s"))
        > ROUTER.server.timeouts.shutdown_grace_s
    )


def test_prometheus_scrapes_the_router_and_every_engine() -> None:
    """It uses their names in the network."""
    assert (DEPLOY / mounts("prometheus")["/etc/prometheus"]).resolve() == PROMETHEUS
    assert "--config.file=/etc/prometheus/prometheus.yml" in SERVICES["prometheus"]["command"]
    jobs = {
        job["job_name"]: job["static_configs"][0]["targets"]
        for job in load(PROMETHEUS / "prometheus.yml")["scrape_configs"]
    }
    assert "router" in ROUTER.server.host_names
    assert jobs == {
        "kvroute": [f"router:{ROUTER.server.port}"],
        "engines": [f"{name}:8000" for name in ENGINES],
    }


def test_grafana_finds_its_data_source_and_its_dashboards() -> None:
    """Three files refer to paths and addresses in each other."""
    provisioning = DEPLOY / mounts("grafana")["/etc/grafana/provisioning"]
    (source,) = load(provisioning / "datasources/prometheus.yaml")["datasources"]
    assert urlsplit(source["url"]).netloc == "prometheus:9090"
    assert SERVICES["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]
    (provider,) = load(provisioning / "dashboards/kvroute.yaml")["providers"]
    folder = provider["options"]["path"]
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == folder
    assert (DEPLOY / mounts("grafana")[folder] / home.name).is_file()
