"""The Helm chart, rendered by helm itself: what comes out is valid, agrees with the router, and
wrong values are refused."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.config.schema import RouterConfig
from tests.deploy.files import DEPLOY, KEYS, PROMETHEUS, ROOT, load, run, succeeds, tool, version

CHART = DEPLOY / "chart"
BASIC: dict[str, Any] = {"keys": {"client": "a", "operator": "b"}}
FULL: dict[str, Any] = {
    "image": {"digest": "sha256:" + "a" * 64},
    "autoscaling": {"enabled": True},
    "engines": {
        "labels": {"app": "sglang", "tier": "gpu"},
        "autoscaling": {"enabled": True, "cachePressure": 0.5},
    },
    "keys": {"existingSecret": "router-keys"},
    "tls": {"secret": "router-tls", "clientCA": "clients"},
    "ingress": {"enabled": True, "host": "llm.example", "className": "nginx", "tlsSecret": "t"},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
    "networkPolicy": {"guardEngines": True, "extraEgress": [{"ports": [{"port": 6379}]}]},
    "monitoring": {
        "podMonitor": True,
        "serviceMonitor": True,
        "prometheusRule": True,
        "dashboard": True,
        "labels": {"release": "prometheus"},
        "tlsConfig": {"cert": {"secret": {"name": "scraper", "key": "tls.crt"}}},
    },
    "config": {"models": [{"name": "llama"}], "server": {"max_concurrent_requests": 7}},
    "extraVolumes": [{"name": "models", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
    "extraEnv": [{"name": "X", "value": "1"}],
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "llm"},
    "nodeSelector": {"pool": "cpu"},
}
SHARING: dict[str, Any] = {
    **BASIC,
    "board": {
        "url": "rediss://valkey.models.svc:6390/1",
        "username": "router",
        "passwordKey": "valkey-password",
        "existingSecret": "shared",
        "caConfigMap": "valkey-ca",
    },
    "state": {"peers": True, "snapshots": {"enabled": True, "sizeLimit": "2Gi"}},
}
PICKED: dict[str, Any] = {
    **BASIC,
    "picker": {
        "enabled": True,
        "port": 9100,
        "failureMode": "FailOpen",
        "from": [{"namespaceSelector": {"matchLabels": {"gateway": "yes"}}}],
    },
}
LISTENING: dict[str, Any] = {
    **BASIC,
    "replicas": 1,
    "engines": {"labels": {"app": "llm-d"}, "dataParallelSize": 2},
    "listen": {"enabled": True},
}
SECRETS = {**KEYS, "BOARD_SECRET": "c", "BOARD_PASSWORD": "d"}
ALL_VALUES = pytest.mark.parametrize(
    "values",
    [BASIC, FULL, SHARING, PICKED, LISTENING],
    ids=["basic", "full", "sharing", "picked", "listening"],
)


def helm() -> str:
    return tool("helm", "none; make tools")


def rendered(directory: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    path = directory / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    done = run(helm(), "template", "r", str(CHART), "--namespace", "models", "-f", str(path))
    assert done.returncode == 0, done.stderr
    (directory / "all.yaml").write_text(done.stdout)
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def one(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def config_of(objects: list[dict[str, Any]]) -> RouterConfig:
    (made,) = [each for each in objects if "kvroute.yaml" in (each.get("data") or {})]
    return RouterConfig.from_yaml(made["data"]["kvroute.yaml"], SECRETS)


@ALL_VALUES
def test_the_chart_renders_to_what_kubernetes_takes(tmp_path: Path, values: dict[str, Any]) -> None:
    """By the schemas of its release; kinds of other projects have none there."""
    rendered(tmp_path, values)
    succeeds(helm(), "lint", "--strict", str(CHART), "--values", str(tmp_path / "values.yaml"))
    validate = tool("kubernetes-validate", "none; make tools")
    said = run(validate, "--strict", str(tmp_path / "all.yaml"))
    unknown = re.findall(r"Couldn't find schema for kind (\w+)", said.stdout + said.stderr)
    assert set(unknown) <= {
        "HTTPRoute",
        "InferencePool",
        "PodMonitor",
        "ServiceMonitor",
        "PrometheusRule",
        "ScaledObject",
    }
    assert "FAIL" not in said.stdout + said.stderr
    assert "ERROR" not in said.stdout + said.stderr
    assert "passed for resource deployment/r-kvroute" in said.stdout + said.stderr


@ALL_VALUES
def test_the_router_takes_the_configuration_that_is_made(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    """And finds the engines that the values name."""
    objects = rendered(tmp_path, values)
    config = config_of(objects)
    labels = values.get("engines", {}).get("labels", {})
    expected = {"app": "vllm", **labels}
    (found_by,) = config.discovery.kubernetes
    assert dict(pair.split("=") for pair in (found_by.selector or "").split(",")) == expected
    assert found_by.port == 8000
    container = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert config.server.port == container["ports"][0]["containerPort"]
    assert container["args"][:3] == ["serve", "--config", "/etc/kvroute/kvroute.yaml"]
    named = {each["name"] for each in container["env"] if "valueFrom" in each}
    assert named == set(SECRETS if values is SHARING else KEYS)


def test_what_the_user_says_is_merged_over_what_the_chart_knows(tmp_path: Path) -> None:
    """One option of a section does not remove the others."""
    config = config_of(rendered(tmp_path, FULL))
    assert config.server.max_concurrent_requests == 7
    assert config.server.host == "0.0.0.0"
    assert [model.name for model in config.models] == ["llama"]
    assert config.server.tls.certificate == "/etc/kvroute-tls/tls.crt"
    assert config.server.tls.client_ca == "/etc/kvroute-client-ca/ca.crt"


@ALL_VALUES
def test_the_pod_may_do_no_more_than_it_needs(tmp_path: Path, values: dict[str, Any]) -> None:
    """Everything that is mounted is read-only but a small directory for temporary files, and one
    for snapshots where they are wanted."""
    objects = rendered(tmp_path, values)
    spec = one(objects, "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable - {"models", "state"} == {"tmp"}
    rules = one(objects, "Role")["rules"]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"list", "watch"}
    grace = config_of(objects).server.timeouts.shutdown_grace_s
    assert spec["terminationGracePeriodSeconds"] > grace + 10


def test_nothing_is_made_that_was_not_asked_for(tmp_path: Path) -> None:
    """A cluster without the Prometheus operator, KEDA or a gateway takes the defaults, and nobody
    is shut out of engines that run already."""
    objects = rendered(tmp_path, BASIC)
    assert {each["apiVersion"].partition("/")[0] for each in objects} == {
        "v1",
        "apps",
        "policy",
        "rbac.authorization.k8s.io",
        "networking.k8s.io",
    }
    (policy,) = [each for each in objects if each["kind"] == "NetworkPolicy"]
    router = one(objects, "Deployment")["spec"]["selector"]["matchLabels"]
    assert policy["spec"]["podSelector"]["matchLabels"] == router


def test_the_policy_lets_through_what_the_user_names(tmp_path: Path) -> None:
    """A router with a board whose server it cannot reach knows less than it could."""
    policies = [each for each in rendered(tmp_path, FULL) if each["kind"] == "NetworkPolicy"]
    (own,) = [each["spec"] for each in policies if "egress" in each["spec"]]
    assert own["egress"][-1] == {"ports": [{"port": 6379}]}
    assert len(own["egress"]) == 4


def test_routers_that_share_find_board_secret_and_each_other(tmp_path: Path) -> None:
    """With the values alone: without them a second router only halves what each one knows."""
    objects = rendered(tmp_path, SHARING)
    config = config_of(objects)
    assert config.board.url == "rediss://valkey.models.svc:6390/1"
    assert (config.board.username, config.board.ca) == ("router", "/etc/kvroute-board-ca/ca.crt")
    assert config.board.secret is not None
    assert config.board.password is not None
    assert config.state.peers == ("http://r-kvroute-peers.models.svc:8000",)
    assert config.state.directory == "/var/lib/kvroute"
    peers = next(each for each in objects if each["metadata"]["name"] == "r-kvroute-peers")
    assert peers["spec"]["clusterIP"] == "None"
    assert (
        peers["spec"]["selector"] == one(objects, "Deployment")["spec"]["selector"]["matchLabels"]
    )
    spec = one(objects, "Deployment")["spec"]["template"]["spec"]
    refs = {
        each["name"]: tuple(each["valueFrom"]["secretKeyRef"].values())
        for each in spec["containers"][0]["env"]
    }
    assert refs["BOARD_SECRET"] == ("shared", "secret")
    assert refs["BOARD_PASSWORD"] == ("shared", "valkey-password")
    mounts = {each["mountPath"]: each for each in spec["containers"][0]["volumeMounts"]}
    assert mounts["/etc/kvroute-board-ca"]["readOnly"]
    assert "readOnly" not in mounts["/var/lib/kvroute"]
    (policy,) = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    ports = [port["port"] for rule in policy["egress"] for port in rule["ports"]]
    assert ports[-2:] == [8000, 6390], "peers, and the board"
    assert "shared" not in [each["metadata"]["name"] for each in objects], "it is the user's"


def test_secrets_of_the_board_are_made_where_they_are_given(tmp_path: Path) -> None:
    """And peers that show certificates, where clients must, show the router's own."""
    board = {"url": "redis://v", "passwordKey": "password", "secret": "s", "password": "p"}
    tls = {"secret": "router-tls", "clientCA": "clients"}
    state = {"peers": True, "peerCAConfigMap": "own-ca"}
    objects = rendered(tmp_path, {**BASIC, "board": board, "tls": tls, "state": state})
    (made,) = [each for each in objects if each["metadata"]["name"] == "r-kvroute-board"]
    assert made["stringData"] == {"secret": "s", "password": "p"}
    (policy,) = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    assert policy["egress"][-1]["ports"] == [{"protocol": "TCP", "port": 6379}]
    state_of = config_of(objects).state
    assert state_of.peers == ("https://r-kvroute-peers.models.svc:8000",)
    assert state_of.peer_tls.ca == "/etc/kvroute-peer-ca/ca.crt"
    assert state_of.peer_tls.certificate == "/etc/kvroute-tls/tls.crt"


def test_the_engines_are_scaled_as_in_the_example(tmp_path: Path) -> None:
    """Whose queries are tested."""
    triggers = one(rendered(tmp_path, FULL), "ScaledObject")["spec"]["triggers"]
    assert triggers == load(DEPLOY / "autoscaling/keda.yaml")["spec"]["triggers"]
    only = {**FULL, "engines": {"autoscaling": {"enabled": True}}}
    assert len(one(rendered(tmp_path, only), "ScaledObject")["spec"]["triggers"]) == 1


def test_alerts_and_dashboard_are_those_of_the_repository(tmp_path: Path) -> None:
    """Unchanged: their own braces are not the chart's."""
    objects = rendered(tmp_path, FULL)
    assert one(objects, "PrometheusRule")["spec"] == load(PROMETHEUS / "alerts.yml")
    (board,) = [each for each in objects if "kvroute.json" in (each.get("data") or {})]
    own = (DEPLOY / "grafana/dashboards/kvroute.json").read_text()
    assert board["data"]["kvroute.json"] == own


@pytest.mark.parametrize("kind", ["podMonitor", "serviceMonitor"])
def test_a_monitor_has_each_router_scraped_once_under_the_job_of_the_alerts(
    tmp_path: Path, kind: str
) -> None:
    """A job is named after the monitor or the service, where nothing else is said: an alert would
    fire for good, others never. And what is scraped twice counts twice, also for autoscalers."""
    values = {**SHARING, "monitoring": {kind: True, "prometheusRule": True}}
    objects = rendered(tmp_path, values)
    monitor = one(objects, kind[0].upper() + kind[1:])["spec"]
    jobs = set(re.findall(r'job="(\w+)"', yaml.safe_dump(one(objects, "PrometheusRule"))))
    wanted = monitor["selector"]["matchLabels"].items()
    (endpoint,) = monitor[{"podMonitor": "podMetricsEndpoints"}.get(kind, "endpoints")]
    pods = [one(objects, "Deployment")["spec"]["template"]]
    services = [each for each in objects if each["kind"] == "Service"]
    (found,) = [
        each
        for each in (pods if kind == "podMonitor" else services)
        if wanted <= each["metadata"]["labels"].items()
        and endpoint["port"] in [port["name"] for port in _ports_of(each["spec"])]
    ]
    assert {found["metadata"]["labels"][monitor["jobLabel"]]} == jobs
    assert "tlsConfig" not in endpoint


def _ports_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    ports: list[dict[str, Any]] = (
        spec["containers"][0]["ports"] if "containers" in spec else spec["ports"]
    )
    return ports


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_routers_that_serve_tls_are_scraped(tmp_path: Path, kind: str) -> None:
    """They are asked by their address, for which no certificate is."""

    def asked(values: dict[str, Any]) -> Any:
        spec = one(rendered(tmp_path, values), kind)["spec"]
        (endpoint,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
        assert endpoint["scheme"] == "https"
        return endpoint["tlsConfig"]

    monitoring = {"podMonitor": True, "serviceMonitor": True}
    plain = {**BASIC, "tls": {"secret": "router-tls"}, "monitoring": monitoring}
    assert asked(plain) == {"insecureSkipVerify": True}
    assert asked(FULL) == FULL["monitoring"]["tlsConfig"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "keys.client or keys.existingSecret"),
        ({**BASIC, "replcas": 3}, "replcas is not allowed"),
        ({**BASIC, "replicas": 0}, "replicas: Must be greater than or equal to 1"),
        ({**BASIC, "image": {"digest": "latest"}}, "image.digest"),
        ({**BASIC, "engines": {"port": "http"}}, "engines.port"),
        ({**BASIC, "ingress": {"enabled": True}}, "ingress.host"),
        ({**BASIC, "state": {"peers": True}}, "board.secret or board.existingSecret"),
        ({**BASIC, "board": {"url": "valkey:6379"}}, "board.url"),
        ({**BASIC, "listen": {"enabled": True}}, "replicas must be 1"),
        ({**LISTENING, "autoscaling": {"enabled": True}}, "without autoscaling"),
        ({**BASIC, "listen": {"port": 0}}, "listen.port"),
        ({**BASIC, "config": {"server": {"port": 9000}}}, "config.server.port: must be 8000"),
        (
            {
                **BASIC,
                "tls": {"secret": "s", "clientCA": "clients"},
                "monitoring": {"podMonitor": True},
            },
            "monitoring.tlsConfig",
        ),
    ],
)
def test_wrong_values_are_refused_with_their_place(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    """By the chart's schema, before anything reaches a cluster."""
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    done = run(helm(), "template", "r", str(CHART), "-f", str(path))
    assert done.returncode != 0
    assert said in done.stderr


def test_the_chart_carries_this_version() -> None:
    """The default tag of the image is the one that the commands at the head of the Dockerfile
    build."""
    chart = load(CHART / "Chart.yaml")
    assert chart["appVersion"] == chart["version"] == version()


@pytest.mark.parametrize("name", ["index.md", "deployment.md"])
def test_the_commands_of_the_documents_install_it(name: str) -> None:
    """It is the first command that an operator with a cluster tries: the quick start's was
    refused."""
    text = (ROOT / "docs" / name).read_text().replace("\\\n", " ")
    (installed, *upgrades) = re.findall(r"^helm (?:install|upgrade) (.*)$", text, re.MULTILINE)
    for upgrade in ("", *upgrades):
        # An upgrade keeps the values of the installation; then what a shell would make of it.
        both = f"{installed} {upgrade.partition('--reuse-values')[2]}"
        filled = re.sub(r'"\$\(openssl rand -hex 32\)"', "a" * 64, both)
        words = shlex.split(filled.replace("deploy/chart", str(CHART)))
        made = succeeds(helm(), "template", *words)
        assert f'image: "{pushed_by(text)}"' in made, "what the line before it builds and pushes"


def pushed_by(document: str) -> str:
    """The image that a document builds and pushes, before the chart is installed."""
    before = document.partition("\nhelm install")[0]
    (*_, command) = re.findall(r"^docker build .*--target router.*$", before, re.MULTILINE)
    words = shlex.split(command)
    assert words[words.index("--file") + 1] == "deploy/Dockerfile"
    assert "--push" in words
    return words[words.index("--tag") + 1]


def test_gateways_find_the_picker_and_the_pool_that_names_it(tmp_path: Path) -> None:
    """A wrong port or label, and every request of the gateway is refused."""
    objects = rendered(tmp_path, PICKED)
    pool = one(objects, "InferencePool")["spec"]
    deployment = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    services = [each for each in objects if each["kind"] == "Service"]
    config = yaml.safe_load(one(objects, "ConfigMap")["data"]["kvroute.yaml"])
    assert config["doors"]["ext_proc"]["listen"] == "0.0.0.0:9100"
    assert {"name": "picker", "containerPort": 9100} in deployment["ports"]
    (service,) = services
    assert pool["endpointPickerRef"] == {
        "name": service["metadata"]["name"],
        "port": {"number": 9100},
        "failureMode": "FailOpen",
    }
    assert 9100 in [port["port"] for port in service["spec"]["ports"]]
    (found,) = config["discovery"]["kubernetes"]
    labels = pool["selector"]["matchLabels"]
    assert ",".join(f"{name}={value}" for name, value in labels.items()) == found["selector"]
    assert pool["targetPorts"] == [{"number": found["port"]}]
    policy = one(objects, "NetworkPolicy")["spec"]["ingress"]
    assert policy[1]["from"] == PICKED["picker"]["from"]


def test_engines_find_where_to_connect_to_and_nobody_else_does(tmp_path: Path) -> None:
    """A port for each rank, on a service that names a router before it is ready; and who reaches it
    can publish in an engine's name."""
    objects = rendered(tmp_path, LISTENING)
    config = config_of(objects)
    assert (config.events.listen, config.events.listen_ranks) == ("tcp://*:5557", 2)
    (found_by,) = config.discovery.kubernetes
    sources = found_by.replica.kv_events or ()
    assert [(each.endpoint, each.dp_rank, each.replay_endpoint) for each in sources] == [
        ("listen", 0, "tcp://*:6557"),
        ("listen", 1, "tcp://*:6558"),
    ]
    (service,) = [each for each in objects if each["metadata"]["name"] == "r-kvroute-events"]
    assert service["spec"]["publishNotReadyAddresses"] is True
    pod = one(objects, "Deployment")["spec"]
    assert service["spec"]["selector"] == pod["selector"]["matchLabels"]
    ports = [port["port"] for port in service["spec"]["ports"]]
    assert ports == [5557, 5558]
    container = pod["template"]["spec"]["containers"][0]
    assert [port["containerPort"] for port in container["ports"]] == [8000, *ports]
    policy = one(objects, "NetworkPolicy")["spec"]
    clients, engines = policy["ingress"]
    assert "from" not in clients
    assert engines["from"] == [{"podSelector": {"matchLabels": {"app": "llm-d"}}}]
    assert [port["port"] for port in engines["ports"]] == ports
    assert {6557, 6558} <= {port["port"] for port in policy["egress"][0]["ports"]}
    own = {"enabled": True, "port": 7000, "replayPort": 0, "from": [{"namespaceSelector": {}}]}
    objects = rendered(tmp_path, {**LISTENING, "listen": own})
    config = config_of(objects)
    assert config.events.listen == "tcp://*:7000"
    (found_by,) = config.discovery.kubernetes
    assert {each.replay_endpoint for each in found_by.replica.kv_events or ()} == {None}
    policy = one(objects, "NetworkPolicy")["spec"]
    assert policy["ingress"][1]["from"] == own["from"]
