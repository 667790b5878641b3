"""The manifests: everything they name exists, their parts agree, and pods may do no more than they
need."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from router.config.schema import RouterConfig
from tests.deploy.files import (
    CONFIG_PATH,
    DEPLOY,
    ENGINE_COMMAND,
    ENGINE_PORTS,
    EVENT_PORT,
    KEYS,
    KUBERNETES,
    REPLAY_PORT,
    ROOT,
    ROUTER_COMMAND,
    load,
    succeeds,
    tool,
    version,
)
from tests.support.router_process import RouterProcess, router_process

BASE = KUBERNETES / "base"
OBJECTS: list[dict[str, Any]] = [
    document
    for name in load(BASE / "kustomization.yaml")["resources"]
    for document in yaml.safe_load_all((BASE / name).read_text())
]
CONFIG = RouterConfig.load(BASE / "kvroute.yaml", KEYS)
KUSTOMIZATION = load(BASE / "kustomization.yaml")


def found(kind: str, name: str) -> dict[str, Any]:
    (manifest,) = [
        each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return manifest


ROUTER, ENGINE = found("Deployment", "router"), found("StatefulSet", "engine")
WORKLOADS = pytest.mark.parametrize("workload", [ROUTER, ENGINE], ids=["router", "engine"])


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod(workload)["containers"]
    return dict(only)


def labels(workload: dict[str, Any]) -> dict[str, str]:
    return dict(workload["spec"]["template"]["metadata"]["labels"])


def ports(workload: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(workload)["ports"]}


# --- as a whole -----------------------------------------------------------------------------------


def rendered(name: str) -> str:
    return succeeds(tool("kubectl", "kubernetes-client"), "kustomize", str(KUBERNETES / name))


@pytest.mark.parametrize("name", ["base", "vllm", "discovered", "connecting"])
def test_the_manifests_are_what_kubernetes_takes(tmp_path: Path, name: str) -> None:
    """They are checked with the schemas of its release, where a misspelt key is an error."""
    validate = tool("kubernetes-validate", "none; make tools")
    (tmp_path / "all.yaml").write_text(rendered(name))
    said = succeeds(validate, "--strict", str(tmp_path / "all.yaml"))
    assert "passed for resource deployment/router" in said


@pytest.mark.parametrize("name", ["base", "vllm"])
def test_everything_is_in_one_namespace_and_every_image_has_a_tag(name: str) -> None:
    """`kubectl delete namespace` must leave nothing behind."""
    objects = list(yaml.safe_load_all(rendered(name)))
    assert len(objects) == len(OBJECTS) + 1, (
        "all of the base and the map that is made of kvroute.yaml"
    )
    assert {each["metadata"].get("namespace", each["metadata"]["name"]) for each in objects} == {
        "kvroute"
    }
    images = [
        container(each)["image"]
        for each in objects
        if each["kind"] in ("Deployment", "StatefulSet")
    ]
    assert len(images) == 2
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images)


def test_the_map_that_is_mounted_is_the_one_that_is_made() -> None:
    """Its name gets a hash, so that a changed file restarts the pods."""
    rendered_objects = list(yaml.safe_load_all(rendered("base")))
    (made,) = [each for each in rendered_objects if each["kind"] == "ConfigMap"]
    (deployment,) = [each for each in rendered_objects if each["kind"] == "Deployment"]
    assert {"name": "config", "configMap": {"name": made["metadata"]["name"]}} in pod(deployment)[
        "volumes"
    ]
    assert made["metadata"]["name"] != "router"
    assert yaml.safe_load(made["data"]["kvroute.yaml"]) == load(BASE / "kvroute.yaml")


def test_our_images_carry_this_version() -> None:
    """It is the tag that the commands at the head of the Dockerfile build."""
    ours = {image["name"]: image["newTag"] for image in KUSTOMIZATION["images"]}
    assert ours == {container(workload)["image"]: version() for workload in (ROUTER, ENGINE)}


# --- engines that are found -----------------------------------------------------------------------

DISCOVERED = KUBERNETES / "discovered"


def test_the_engines_are_found_by_their_own_labels_and_port() -> None:
    """The selector must choose every pod of the set and nothing else."""
    config = RouterConfig.load(DISCOVERED / "kvroute.yaml", KEYS)
    assert config.replicas == ()
    (found_by,) = config.discovery.kubernetes
    name, _, value = (found_by.selector or "").partition("=")
    assert labels(ENGINE)[name] == value
    assert labels(ROUTER)[name] != value
    assert found_by.port in ports(ENGINE)
    assert found_by.namespace is None, "its own, whatever that is called"


def test_the_routers_may_ask_for_what_they_need_and_nothing_else() -> None:
    """The paths that the router asks for, and no verb that changes anything."""
    role, binding, policy = yaml.safe_load_all((DISCOVERED / "access.yaml").read_text())
    allowed = {
        (group, resource)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert allowed == {
        ("", "pods"),
        ("discovery.k8s.io", "endpointslices"),
        ("inference.networking.k8s.io", "inferencepools"),
    }
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"list", "watch"}
    account = found("ServiceAccount", "router")["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert policy["spec"]["podSelector"]["matchLabels"] == labels(ROUTER)


def test_their_account_has_a_token_there() -> None:
    """In the base it has none, since nothing needs it."""
    objects = list(yaml.safe_load_all(rendered("discovered")))
    (account,) = [each for each in objects if each["kind"] == "ServiceAccount"]
    (deployment,) = [each for each in objects if each["kind"] == "Deployment"]
    assert account["automountServiceAccountToken"] is True
    assert pod(deployment)["automountServiceAccountToken"] is True
    assert pod(ROUTER)["automountServiceAccountToken"] is False
    (made,) = [each for each in objects if each["kind"] == "ConfigMap"]
    assert yaml.safe_load(made["data"]["kvroute.yaml"]) == load(DISCOVERED / "kvroute.yaml")


# --- engines that connect -------------------------------------------------------------------------


def test_engines_connect_where_the_router_listens_under_their_pods_address() -> None:
    """A port, a name or a topic that is another, and no cache is known."""
    objects = list(yaml.safe_load_all(rendered("connecting")))

    def made(kind: str, name: str) -> dict[str, Any]:
        (only,) = [
            each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)
        ]
        return only

    config = RouterConfig.load(KUBERNETES / "connecting/kvroute.yaml", KEYS)
    router, engine = made("Deployment", "router"), made("StatefulSet", "engine")
    service = made("Service", "router-events")["spec"]
    assert config.events.listen == f"tcp://*:{ports(router)['events']}"
    assert (service["selector"], service["publishNotReadyAddresses"]) == (labels(router), True)
    (port,) = service["ports"]
    assert (port["targetPort"], port["port"]) == ("events", EVENT_PORT)
    arguments = container(engine)["args"]
    given = dict(itertools.pairwise(arguments))
    assert given["--kv-events-endpoint"] == f"tcp://router-events:{EVENT_PORT}"
    assert given["--kv-events-topic"].startswith("kv@$(POD_IP)@")
    (address,) = container(engine)["env"]
    assert address["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    (found_by,) = config.discovery.kubernetes
    (source,) = found_by.replica.kv_events or ()
    assert source.endpoint == "listen"
    assert source.replay_endpoint == given["--kv-events-replay-endpoint"]
    assert router["spec"]["replicas"] == 1, "an engine connects to one"
    assert ports(router)["http"] == ports(ROUTER)["http"]
    clients, engines = made("NetworkPolicy", "router")["spec"]["ingress"]
    assert "from" not in clients
    assert engines["from"] == [{"podSelector": {"matchLabels": labels(engine)}}]
    assert [port["port"] for port in engines["ports"]] == [EVENT_PORT]


# --- the router -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["kubernetes/base/kvroute.yaml", "compose/kvroute.yaml"])
def test_the_command_line_finds_the_configuration_sound(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is checked by the command of the pod."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    said = succeeds(
        sys.executable, "-m", "router.cli.main", "serve", "--config", str(DEPLOY / path), "--check"
    )
    assert said == "the configuration is sound: 0 models, 3 replicas\n"


def test_the_router_reads_the_file_that_is_mounted() -> None:
    """The key of the map is the name of the file."""
    assert container(ROUTER)["args"] == ROUTER_COMMAND
    (generator,) = KUSTOMIZATION["configMapGenerator"]
    (mount,) = [mount for mount in container(ROUTER)["volumeMounts"] if mount["name"] == "config"]
    assert f"{mount['mountPath']}/{generator['files'][0]}" == CONFIG_PATH
    assert {"name": "config", "configMap": {"name": generator["name"]}} in pod(ROUTER)["volumes"]


def test_every_key_of_the_configuration_comes_from_the_secret() -> None:
    """The router does not start if a variable is missing."""
    named = set(re.findall(r"\$\{(\w+)\}", (BASE / "kvroute.yaml").read_text()))
    given = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in container(ROUTER)["env"]}
    assert named == set(given) == set(KEYS)
    created = re.search(
        r"create secret generic (\S+) (.*?)```",
        (ROOT / "docs/deployment.md").read_text(),
        re.DOTALL,
    )
    assert created
    keys = set(re.findall(r"--from-literal=(\w+)=", created[2]))
    assert {(each["name"], each["key"]) for each in given.values()} == {
        (created[1], key) for key in keys
    }


def test_the_replicas_are_the_pods_of_the_stateful_set() -> None:
    """A pod has the name of the set and a number; its address is below the headless service."""
    service = found("Service", ENGINE["spec"]["serviceName"])
    assert service["spec"]["clusterIP"] == "None"
    names = [
        f"{ENGINE['metadata']['name']}-{number}" for number in range(ENGINE["spec"]["replicas"])
    ]
    hosts = [f"{name}.{service['metadata']['name']}:{ports(ENGINE)['http']}" for name in names]
    assert [urlsplit(replica.url).netloc for replica in CONFIG.replicas] == hosts
    assert [replica.id for replica in CONFIG.replicas] == names


def test_the_router_listens_where_it_is_looked_for() -> None:
    """It listens on the port of the container, at every address of the pod."""
    assert (CONFIG.server.host, CONFIG.server.port) == ("0.0.0.0", ports(ROUTER)["http"])


def test_running_requests_have_the_time_that_the_router_gives_them() -> None:
    """The time counts from when the pod begins to stop, including the wait for the service to
    notice."""
    command = container(ROUTER)["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    grace = pod(ROUTER)["terminationGracePeriodSeconds"]
    assert grace > int(command[1]) + CONFIG.server.timeouts.shutdown_grace_s


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process() as process:
        yield process


@pytest.mark.parametrize(
    ("probe", "status"), [("startupProbe", 200), ("livenessProbe", 200), ("readinessProbe", 503)]
)
async def test_the_probes_use_endpoints_of_the_router(
    router: RouterProcess, probe: str, status: int
) -> None:
    """A router without a replica is alive but not ready; if it were killed for that, it would never
    become ready."""
    asked = container(ROUTER)[probe]["httpGet"]
    assert asked["port"] in ports(ROUTER)
    assert (await router.get(asked["path"])).status == status


# --- engines --------------------------------------------------------------------------------------


def test_the_engines_run_the_engines_command() -> None:
    """It is the same in the image and the compose file."""
    assert container(ENGINE)["args"] == ENGINE_COMMAND
    assert set(ports(ENGINE).values()) == ENGINE_PORTS
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container(ENGINE)[probe]["httpGet"] == {"path": CONFIG.health.path, "port": "http"}


def test_vllm_runs_with_the_flags_of_the_recipe() -> None:
    """The document and the overlay must not drift apart."""
    arguments = container(load(KUBERNETES / "vllm/engine.yaml"))["args"]
    events = json.loads(arguments[arguments.index("--kv-events-config") + 1])
    assert events["endpoint"] == f"tcp://*:{EVENT_PORT}"
    assert events["replay_endpoint"] == f"tcp://*:{REPLAY_PORT}"
    flags = {
        argument for argument in arguments if argument.startswith("--") and "=" not in argument
    }
    assert flags == set(re.findall(r"--[a-z-]+", recipe()))
    (text,) = re.findall(r"--kv-events-config '(.*?)'", recipe(), re.DOTALL)
    assert json.loads(text) == events


def recipe() -> str:
    """The `vllm serve` command of the document, to the end of its block."""
    return (ROOT / "docs/deployment.md").read_text().partition("vllm serve ")[2].partition("```")[0]


# --- how they hang together -----------------------------------------------------------------------


@WORKLOADS
def test_a_workload_selects_its_own_pods(workload: dict[str, Any]) -> None:
    """The two workloads have no pod in common."""
    assert workload["spec"]["selector"]["matchLabels"] == labels(workload)
    assert labels(ROUTER) != labels(ENGINE)


@pytest.mark.parametrize(("name", "workload"), [("router", ROUTER), ("engine", ENGINE)])
def test_services_budgets_and_policies_select_pods_that_exist(
    name: str, workload: dict[str, Any]
) -> None:
    """Kubernetes does not report a selector that matches nothing."""
    service = found("Service", name)
    assert service["spec"]["selector"] == labels(workload)
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports(
        workload
    )
    assert found("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"] == labels(workload)
    assert found("NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"] == labels(workload)


def test_a_disruption_leaves_a_router() -> None:
    """With a single router the budget would mean nothing."""
    budget = found("PodDisruptionBudget", "router")["spec"]["maxUnavailable"]
    assert ROUTER["spec"]["replicas"] > budget


def test_engines_are_reached_by_routers_and_prometheus_only() -> None:
    """Their events contain prompts."""
    routers, prometheus = found("NetworkPolicy", "engine")["spec"]["ingress"]
    assert routers["from"] == [{"podSelector": {"matchLabels": labels(ROUTER)}}]
    assert {port["port"] for port in routers["ports"]} == ENGINE_PORTS
    assert [port["port"] for port in prometheus["ports"]] == [ports(ENGINE)["http"]]


def test_routers_reach_engines_and_names_only() -> None:
    """A compromised router could reach nothing else."""
    engines, names = found("NetworkPolicy", "router")["spec"]["egress"]
    assert engines["to"] == [{"podSelector": {"matchLabels": labels(ENGINE)}}]
    assert {port["port"] for port in engines["ports"]} == ENGINE_PORTS
    assert {(port["protocol"], port["port"]) for port in names["ports"]} == {
        ("UDP", 53),
        ("TCP", 53),
    }


# --- what pods may do -----------------------------------------------------------------------------


@WORKLOADS
def test_a_pod_has_only_the_rights_it_needs(workload: dict[str, Any]) -> None:
    """It meets the standard of its namespace, and has a read-only file system."""
    spec, security = pod(workload)["securityContext"], container(workload)["securityContext"]
    assert spec["runAsNonRoot"]
    assert spec["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert found("Namespace", "kvroute")["metadata"]["labels"] == {
        "pod-security.kubernetes.io/enforce": "restricted"
    }
    user = re.search(r"^USER (\d+):(\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert user
    assert (spec["runAsUser"], spec["runAsGroup"]) == (int(user[1]), int(user[2]))


@WORKLOADS
def test_a_pod_has_no_access_to_kubernetes(workload: dict[str, Any]) -> None:
    """Nothing here uses the API, so there are no roles."""
    assert pod(workload)["automountServiceAccountToken"] is False
    assert not {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"} & {
        each["kind"] for each in OBJECTS
    }


@WORKLOADS
def test_a_container_declares_its_resources(workload: dict[str, Any]) -> None:
    """Without a request it is evicted first; without a limit it can take down the node."""
    resources = container(workload)["resources"]
    assert set(resources["requests"]) == {"cpu", "memory"}
    assert "memory" in resources["limits"]


def test_the_alert_on_the_index_fires_before_the_memory_is_full() -> None:
    """At 65 bytes a block, as the index is measured to need; other parts need memory, too."""
    (limit,) = re.findall(r"^(\d+)Gi$", container(ROUTER)["resources"]["limits"]["memory"])
    (blocks,) = re.findall(
        r"kvroute_index_blocks\) > (\S+)$",
        (DEPLOY / "prometheus/alerts.yml").read_text(),
        re.MULTILINE,
    )[:1]
    used = float(blocks) * 65 / (int(limit) * 2**30)
    assert 0.4 < used < 0.6, "neither for nothing nor too late"
