"""One YAML file in; a frozen model, or every problem at once with its place."""

from __future__ import annotations

import contextlib
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import yaml
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from kvevents.layout import GroupKind, KVCacheGroup
from router.config.models import ModelConfig
from router.config.replica import ReplicaConfig, read_replica
from router.config.schema import RouterConfig
from router.config.server import TimeoutsConfig
from router.config.watch import HealthConfig
from router.errors import BadRequest, ConfigError
from router.index.layout_learner import LayoutHints, StoreHint
from router.policies import PolicySettings, make_policy, policy_names
from router.policies.policies import BUILT_IN

FULL = """
server:
  host: 0.0.0.0
  port: 9000
  client_api_key: ${CLIENT_KEY}
  operator_api_key: ${OPERATOR_KEY}
  max_body_bytes: 1048576
  timeouts: {connect_s: 1.5, idle_s: 30}
models:
  - name: google/gemma-3-27b-it
    aliases: [gemma]
    tokenizer: models/gemma
    chat_template: templates/gemma.jinja
    lora_adapters: [gemma-sql]
    layout:
      groups:
        - {kind: full_attention, block_size: 16}
        - {kind: sliding_window, block_size: 16, sliding_window: 1024}
      hash_block_size: 16
      eagle: true
      hash_seeds: ["7"]
  - name: bamba
replicas:
  - id: r0
    url: http://10.0.0.1:8000
    models: [gemma, gemma-sql]
    kv_events:
      - {endpoint: "tcp://*:5557", replay_endpoint: "tcp://*:6557", topic: kv, dp_rank: 0}
      - {endpoint: "tcp://10.0.0.1:5558", dp_rank: 1}
    api_key: ${REPLICA_KEY}
    speed: 2
    max_concurrent_requests: 64
    priority_order: lower_first
  - url: https://replica.example:8443/base
policy:
  name: session
  session_header: x-user
  weights: {decode_request: 32, suspect_trust: 0.25}
health: {interval_s: 5, timeout_s: 1, healthy_after: 2}
events: {max_frame_bytes: 4194304}
observability: {log_format: json}
"""

ENVIRON = {
    "CLIENT_KEY": "sk-client-1",
    "OPERATOR_KEY": "sk-operator-2",
    "REPLICA_KEY": "sk-replica-3",
}


NO_KEY = "not shown; a key is 1 to 4096 visible ASCII characters, or ${NAME} and nothing around it"


def read(text: str, **environ: str) -> RouterConfig:
    return RouterConfig.from_yaml(text, environ)


def problems(text: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, **environ)
    return [str(problem) for problem in caught.value.problems]


# --- what is right --------------------------------------------------------------------------------


def test_a_full_file_is_read_value_by_value() -> None:
    """Every section, nested and in lists."""
    config = RouterConfig.from_yaml(FULL, ENVIRON)
    assert (config.server.host, config.server.port, config.server.max_body_bytes) == (
        "0.0.0.0",
        9000,
        1048576,
    )
    assert config.server.client_api_key == SecretStr("sk-client-1")
    assert config.server.timeouts == TimeoutsConfig(connect_s=1.5, idle_s=30.0)
    assert [model.name for model in config.models] == ["google/gemma-3-27b-it", "bamba"]
    first, second = config.replicas
    assert (first.replica_id, first.speed, first.max_concurrent_requests) == ("r0", 2.0, 64)
    assert first.priority_order == "lower_first"
    assert first.api_key is not None
    assert first.api_key.get_secret_value() == "sk-replica-3"
    assert [source.dp_rank for source in first.kv_events or ()] == [0, 1]
    assert (second.replica_id, str(second.origin)) == (
        "replica.example:8443",
        "https://replica.example:8443/base",
    )
    assert (second.models, second.kv_events) == (None, None)
    assert config.policy.weights.decode_request == 32
    assert config.health == HealthConfig(interval_s=5, timeout_s=1, healthy_after=2)
    assert config.observability.log_format == "json"


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "server:\nhealth:\n"])
def test_what_is_left_out_has_its_default(text: str) -> None:
    """A router without a file starts, on loopback; a section whose lines are all commented out is
    no error."""
    config = read(text)
    assert config == RouterConfig()
    assert config.server.host == "127.0.0.1"
    assert config.policy.name == "least_delay"


@pytest.mark.parametrize(
    ("text", "owns"),
    [
        ("{}", False),
        ("replicas: [{url: http://a:1, priority_order: ask}]", True),
        ("replicas: [{url: http://a:1}]", False),
        ("discovery: {dns: [{name: a, port: 1, replica: {priority_order: lower_first}}]}", True),
        ("overload: {max_in_flight: 4}", True),
    ],
)
def test_where_the_router_orders_requests_clients_do_not(text: str, owns: bool) -> None:
    """Else each could put itself first."""
    assert RouterConfig.from_yaml(text, {}).owns_priority is owns


@pytest.mark.parametrize("text", ["10.0.0.999", "::1::", "10.0.0.1#65536"])
def test_a_name_server_is_an_address(text: str) -> None:
    """Another one was found out only when it was to be used: no configuration was read after it."""
    (found,) = problems(f"discovery: {{dns: [{{name: a, port: 1, nameserver: '{text}'}}]}}")
    assert found == (f"discovery.dns[0].nameserver: {text!r}; expected an address, or address#port")


def test_a_layout_becomes_hints_for_the_index() -> None:
    """The index knows nothing of files."""
    config = RouterConfig.from_yaml(FULL, ENVIRON)
    assert config.models[0].layout.to_hints() == LayoutHints(
        groups=(
            KVCacheGroup(GroupKind.FULL, 16),
            KVCacheGroup(GroupKind.SLIDING_WINDOW, 16, sliding_window=1024),
        ),
        hash_block_size=16,
        eagle=True,
        hash_seeds=("7",),
    )


@pytest.mark.parametrize(
    ("eagle", "hint"), [("true", True), ("false", False), ("[0, 2]", (0, 2)), ("[]", ())]
)
def test_eagle_is_a_flag_or_the_groups_with_the_drafters_layers(
    eagle: str, hint: bool | tuple[int, ...]
) -> None:
    """A server with a drafter flags some groups; older ones drop a block in all."""
    config = read(f"models: [{{name: m, layout: {{eagle: {eagle}}}}}]")
    found = config.models[0].layout.to_hints().eagle
    assert (found, type(found)) == (hint, type(hint))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("{eagle: [0, 256]}", "models[0].layout.eagle: [0, 256]; must be true, false, or a list"),
        ("{eagle: [-1]}", "models[0].layout.eagle: [-1]; must be"),
        ("{eagle: [true]}", "models[0].layout.eagle: [True]; must be"),
        ("{eagle: some}", "models[0].layout.eagle: 'some'; must be"),
        ("{eagle: 1}", "models[0].layout.eagle: 1; must be"),
        (
            "{eagle: [1], groups: [{kind: full_attention, block_size: 16}]}",
            "eagle names group 1: it must be one of 1 groups",
        ),
        ("{prefix_replay_tokens: -1}", "models[0].layout.prefix_replay_tokens"),
    ],
)
def test_groups_and_windows_that_cannot_be_are_refused(layout: str, message: str) -> None:
    """An operator reads what is wrong, and where."""
    with pytest.raises(ConfigError) as refused:
        read(f"models: [{{name: m, layout: {layout}}}]")
    assert message in str(refused.value)


def test_the_window_of_a_replay_reaches_the_index() -> None:
    """DeepSeek V4.1 rebuilds its windows after a hit."""
    config = read("models: [{name: m, layout: {prefix_replay_tokens: 128}}]")
    assert config.models[0].layout.to_hints() == LayoutHints(prefix_replay_tokens=128)


def test_without_a_layout_the_hints_are_the_indexs_own_defaults() -> None:
    """Two places for one default would drift apart."""
    assert ModelConfig(name="m").layout.to_hints() == LayoutHints()


def test_paths_in_a_file_start_at_its_own_directory(tmp_path: Path) -> None:
    """A service is started from anywhere."""
    file = tmp_path / "kvroute.yaml"
    file.write_text(FULL)
    model, other = RouterConfig.load(file, ENVIRON).models
    assert model.tokenizer == str(tmp_path / "models/gemma")
    assert model.chat_template == str(tmp_path / "templates/gemma.jinja")
    assert other.tokenized_at_replica


def test_the_model_is_frozen() -> None:
    """What was validated stays as it was validated."""
    config = read("")
    with pytest.raises(ValidationError):
        config.server = None  # type: ignore[misc, assignment]
    with pytest.raises(ValidationError):
        config.server.port = 1  # type: ignore[misc]


def test_the_policy_of_every_known_name_can_be_configured() -> None:
    """The list in the configuration and the one of the policies are the same."""
    for name in policy_names():
        config = read(f"policy: {{name: {name}}}")
        assert make_policy(
            config.policy.name,
            PolicySettings(config.policy.weights, config.policy.options, Random(1)),
        )


def test_an_empty_list_of_sources_is_not_the_same_as_none() -> None:
    """Empty means that the replica publishes nothing; left out means that it is asked."""
    config = read(
        "replicas: [{url: 'http://a:1', kv_events: []}, {url: 'http://b:1', kv_events: null}]"
    )
    assert config.replicas[0].kv_events == ()
    assert config.replicas[1].kv_events is None


STORES = """
models:
  - name: m
    stores:
      - {name: disk, tiers: [Storage, fs], replicas: ["eu-*", us-1]}
      - {name: pool, ownership: s3}
"""


def test_stores_are_shared_by_the_replicas_that_their_patterns_fit() -> None:
    """Replicas that come later are not in the file; their names tell where they are."""
    disk, pool = read(STORES).models[0].stores
    assert disk.to_hint() == StoreHint("disk", ("STORAGE", "FS"))
    assert pool.to_hint() == StoreHint("pool", (), "s3")
    assert [disk.is_shared_by(name) for name in ("eu-7", "us-1", "us-10", "EU-7")] == [
        True,
        True,
        False,
        False,
    ]
    assert pool.is_shared_by("anything")


def test_a_store_costs_what_the_slowest_tier_behind_it_does() -> None:
    """Unless it is given a cost by its name, in any case."""
    policy = "policy: {weights: {lower_tier_token: 0.2, tier_token: {storage: 0.3, fs: 0.6}}}"
    weights = read(STORES + policy).weights
    assert (weights.of_tier("disk"), weights.of_tier("pool")) == (0.6, 0.3)
    assert (weights.of_tier("Storage"), weights.of_tier("CPU")) == (0.3, 0.2)
    named = read(STORES + policy.replace("fs: 0.6", "DISK: 0.4")).weights
    assert named.of_tier("disk") == 0.4


# --- secrets --------------------------------------------------------------------------------------


def test_no_secret_is_in_anything_that_may_be_printed() -> None:
    """Configurations are logged, shown at /replicas, and pasted into issues."""
    config = RouterConfig.from_yaml(FULL, ENVIRON)
    public = config.to_public_dict()
    text = (
        repr(config)
        + str(config)
        + repr(public)
        + msgspec.json.encode(public).decode()
        + yaml.safe_dump(str(public))
    )
    assert not any(value in text for value in ENVIRON.values())
    assert public["server"]["client_api_key"] == public["replicas"][0]["api_key"] == "***"
    assert public["replicas"][1]["api_key"] is None
    assert public["server"]["port"] == 9000


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            '"${MISSING}"',
            "server.client_api_key: ${MISSING}; this environment variable is not set, or empty",
        ),
        (
            '"${EMPTY}"',
            "server.client_api_key: ${EMPTY}; this environment variable is not set, or empty",
        ),
        (
            '"${sk-secret}"',
            "server.client_api_key: not shown;"
            " ${...} must hold the name of an environment variable",
        ),
        (
            '"Bearer ${SPACED}"',
            f"server.client_api_key: {NO_KEY}",
        ),
        (
            '"${SPACED}"',
            f"server.client_api_key: {NO_KEY}",
        ),
        ("12345", "server.client_api_key: not shown (int); expected a key or ${NAME} in quotes"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused_without_being_shown(
    value: str, expected: str
) -> None:
    """The message of a failed start is the first thing that is shared."""
    found = problems(f"server: {{client_api_key: {value}}}", EMPTY="", SPACED="sk secret")
    assert found == [expected]
    assert "secret" not in found[0]


def test_environment_variables_are_for_keys_only() -> None:
    """A URL from the environment would end up in logs and answers."""
    assert problems("replicas: [{url: 'http://${HOST}:80'}]", HOST="h") == [
        "replicas[0].url: holds a ${...}; environment variables are for API keys only"
    ]


# --- what is wrong --------------------------------------------------------------------------------


def test_all_problems_are_reported_at_once() -> None:
    """One round trip for one file, not one for each mistake."""
    text = """
    servr: {}
    server:
      port: 70000
      prot: 1
      timeouts: {connect_s: -1, idle_s: soon}
      retries: {further_attempts: -1, budget_share: -1, budget_burst: -1}
    models:
      - {name: "", tokenizer: 5}
      - name: m
        layout: {groups: [{kind: sliding_window, block_size: 16}], scheduler_block_size: 16}
    replicas:
      - {url: "ftp://h", id: "a b", speed: 0}
      - 5
      - {id: r}
      - {url: "http://h:1", kv_events: [{endpoint: "5557"}, {endpoint: "tcp://h:1", dp_rank: -1}]}
    policy: {name: prefx, weights: {decode_request: .nan, suspect_trust: 2}}
    health: [1]
    """
    assert problems(text) == [
        "servr: unknown key; did you mean server?",
        "server.prot: unknown key; did you mean port?",
        "server.port: 70000; must be less than or equal to 65535",
        "server.timeouts.connect_s: -1; must be greater than 0",
        "server.timeouts.idle_s: 'soon'; must be a valid number",
        "server.retries.further_attempts: -1; must be greater than or equal to 0",
        "server.retries.budget_share: -1; must be greater than or equal to 0",
        "server.retries.budget_burst: -1; must be greater than or equal to 0",
        "models[0].name: ''; must have at least 1 character",
        "models[0].tokenizer: 5; must be a valid string",
        "models[1].layout.groups[0]: group 0 (sliding_window):"
        " sliding_window None must lie in [1, 2147483648]",
        "replicas[0].url: 'ftp://h' must begin with http:// or https://",
        "replicas[0].id: 'a b'; must match pattern '^[A-Za-z0-9_.:-]{1,128}$'",
        "replicas[0].speed: 0; must be greater than or equal to 0.001",
        "replicas[1]: 5; expected a mapping",
        "replicas[2].url: is missing",
        "replicas[3].kv_events[0].endpoint: '5557'; expected tcp://host:port, ipc://path, "
        "http://host:port/path or listen",
        "replicas[3].kv_events[1].dp_rank: -1; must be greater than or equal to 0",
        f"policy.name: 'prefx'; expected one of {', '.join(BUILT_IN)}",
        "policy.weights.decode_request: nan; must be a finite number",
        "policy.weights.suspect_trust: 2; must be less than or equal to 1",
        "health: a list of 1; expected a mapping",
    ]


def test_the_message_has_a_line_for_each_problem() -> None:
    """It is printed to a terminal."""
    with pytest.raises(ConfigError) as caught:
        read("server: {port: -1, host: 5}")
    assert str(caught.value).splitlines() == [
        "2 problems in the configuration:",
        "  server.host: 5; must be a valid string",
        "  server.port: -1; must be greater than or equal to 0",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "replicas: [{url: 'http://a:1', id: r}, {url: 'http://b:1', id: r}]",
            "replicas[1].id: 'r'; replicas[0].id has it already",
        ),
        (
            "replicas: [{url: 'http://a'}, {url: 'http://A:80/', id: r}]",
            "replicas[1].url: 'http://a:80'; replicas[0].url has it already",
        ),
        (
            "models: [{name: a}, {name: b, aliases: [a]}]",
            "models[1].aliases[0]: 'a'; models[0].name has it already",
        ),
        (
            "models: [{name: a, lora_adapters: [x, x]}]",
            "models[0].lora_adapters[1]: 'x'; models[0].lora_adapters[0] has it already",
        ),
        (
            "models: [{name: gemma, aliases: [g]}]\n"
            "replicas: [{url: 'http://a', models: [g, gemna]}]",
            "replicas[0].models[1]: 'gemna'; expected one of the configured models: g, gemma",
        ),
        (
            "replicas: [{url: 'http://a', kv_events: [{endpoint: 'tcp://a:1'}, {endpoint: 'tcp://a:2'}]}]",
            "replicas[0].kv_events[1].dp_rank: 0; kv_events[0] has it already",
        ),
        (
            "models: [{name: m, stores: [{name: s}, {name: s, tiers: [FS]}]}]",
            "models[0].stores[1].name: 's'; stores[0] has it already",
        ),
        (
            "models: [{name: m, stores: [{name: s, tiers: [FS, gpu]}]}]",
            "models[0].stores[0].tiers[1]: 'gpu'; a GPU's blocks are its replica's own",
        ),
        (
            "health: {interval_s: 10}",
            "health.engine_load_stale_after_s: 10; must exceed interval_s (10)",
        ),
        (
            "policy: {options: {a: 1}}",
            "policy.options: a mapping of 1; the built-in policies take none",
        ),
        (
            "models: [{name: a, layout: {authoritative: true}}]",
            "models[0].layout.authoritative: true; there must be groups for that",
        ),
        (
            "models: [{name: a, layout: {groups: [{kind: nope, block_size: 16}]}}]",
            "models[0].layout.groups[0]: group 0: kind 'nope' must be one of full_attention",
        ),
        (
            "models: [{name: a, layout: {groups: [{kind: full_attention, block_size: 24}],"
            " hash_block_size: 16}}]",
            "models[0].layout: layout: scheduler_block_size 24 must be a multiple of"
            " hash_block_size 16",
        ),
    ],
)
def test_what_contradicts_is_refused_with_both_places(text: str, expected: str) -> None:
    """Each value is right by itself; together they would make something else than was meant."""
    found = problems(text)
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_problems_between_sections_are_reported_beside_those_inside() -> None:
    """A typo in one replica must not hide that two others share an id."""
    text = """
    server: {port: x}
    replicas: [{url: 'http://a', id: r}, {url: 'http://b', id: r}, {url: nonsense}]
    """
    assert problems(text) == [
        "server.port: 'x'; must be a valid integer",
        "replicas[2].url: 'nonsense' must begin with http:// or https://",
        "replicas[1].id: 'r'; replicas[0].id has it already",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "server: {port: 1}\nserver: {port: 2}",
            "line 2, column 1: the key 'server' appears twice",
        ),
        ("server: {port: 1, port: 2}", "line 1, column 19: the key 'port' appears twice"),
        ("server: [", "line 1, column 10: expected the node content, but found '<stream end>'"),
        ("server: *nowhere", "line 1, column 9: found undefined alias 'nowhere'"),
        ("? [a]\n: 1", "line 1, column 3: found unhashable key"),
        (
            "server: !!python/object/apply:os.system [id]",
            "line 1, column 9: could not determine a constructor",
        ),
        ("[1, 2]", "a list of 2; expected a mapping"),
        ("just text", "'just text'; expected a mapping"),
        ("a\x00b", "is not YAML: ReaderError"),
        ("server: 2024-99-99", "is not YAML: ValueError"),
        ("[" * 5000, "is not YAML: RecursionError"),
        ('server: !!int ""', "is not YAML: IndexError"),
        ("server: !!timestamp now", "is not YAML: AttributeError"),
    ],
)
def test_invalid_yaml_is_refused_with_its_line(text: str, expected: str) -> None:
    """A key that appears twice would otherwise silently take its last value."""
    (found,) = problems(text)
    assert found.startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server: {8080: x}", "server[8080]: unknown key; known here: host, port"),
        ('"ser\\ud800ver": {}', "must be a valid string, unable to parse raw data as a unicode"),
        ("replicas: [{url: 'http://a', models: !!set {a}}]", "models: {'a'}; expected a list"),
        ("server: {host: !!binary aG9zdA==}", "server.host: b'host'; must be a valid string"),
        ("server: {port: '${PORT}'}", "server.port: holds a ${...}; environment variables are for"),
        ("policy: {weights: {prefil: 1}}", "policy.weights.prefil: unknown key; known here: lower"),
        ("policy: {weights: 5}", "policy.weights: 5; expected a mapping"),
        ("policy: {name: mine, options: 5}", "policy.options: 5; expected a mapping"),
    ],
)
def test_what_yaml_can_say_and_the_model_cannot_is_refused_with_its_place(
    text: str, expected: str
) -> None:
    """YAML has keys of every type, sets, bytes and halves of surrogate pairs."""
    assert any(expected in found for found in problems(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server: false", "server: False; expected a mapping"),
        ("server: []", "server: a list of 0; expected a mapping"),
        ("doors: ''", "doors: ''; expected a mapping"),
        ("doors: {ext_proc: 0}", "doors.ext_proc: 0; expected a mapping"),
        ("replicas: false", "replicas: False; expected a list"),
        ("replicas: {}", "replicas: a mapping of 0; expected a list"),
    ],
)
def test_the_command_line_hides_no_fault_of_the_file(text: str, expected: str) -> None:
    """A file that one command refuses, another must not take for one that leaves a section out."""
    given: dict[str, Any] = {
        "server": {"port": 1},
        "replicas": [{"url": "http://a"}],
        "doors": {"ext_proc": {}},
    }
    with pytest.raises(ConfigError) as refused:
        RouterConfig.from_yaml(text, {}, overrides=given)
    assert expected in str(refused.value)


def test_the_command_line_fills_what_the_file_leaves_empty() -> None:
    """A section whose lines are all commented out is null in YAML."""
    given: dict[str, Any] = {"server": {"port": 1}, "replicas": [{"url": "http://a"}]}
    config = RouterConfig.from_yaml("server:\nreplicas:\n", {}, overrides=given)
    assert (config.server.port, config.replicas[0].url) == (1, "http://a")


def test_merged_mappings_may_be_overridden() -> None:
    """YAML's own way of sharing settings is no duplicate."""
    text = "replicas:\n- &one {url: 'http://a', speed: 2}\n- {<<: *one, url: 'http://b'}"
    assert [(replica.url, replica.speed) for replica in read(text).replicas] == [
        ("http://a", 2.0),
        ("http://b", 2.0),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        (b"#" * (4 * 1024 * 1024 + 1), "at most 4194304"),
    ],
    ids=["missing", "binary", "huge"],
)
def test_a_file_that_cannot_be_read_says_why(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    """The wrong path is the commonest mistake of all."""
    file = tmp_path / "kvroute.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        RouterConfig.load(file, {})


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
known = st.dictionaries(
    st.sampled_from(
        ["server", "models", "replicas", "policy", "health", "events", "observability", "index"]
    ),
    plain
    | st.lists(
        st.dictionaries(
            st.sampled_from(["name", "url", "id", "layout", "kv_events", "models", "aliases"]),
            plain,
        )
    )
    | st.dictionaries(
        st.sampled_from(["port", "host", "timeouts", "name", "weights", "interval_s", "options"]),
        plain,
    ),
    max_size=4,
)


@settings(max_examples=60)
@given(plain | known)
def test_any_document_is_read_or_refused(document: Any) -> None:
    """No other exception than our own leaves the reader."""
    with contextlib.suppress(ConfigError):
        assert isinstance(read(yaml.safe_dump(document)), RouterConfig)


# --- a replica in a request -----------------------------------------------------------------------


def test_a_replica_in_a_request_has_the_same_form() -> None:
    """What POST /replicas takes can be moved to the file as it is."""
    data = {
        "url": "http://h:1",
        "id": "r",
        "api_key": "sk-1",
        "kv_events": [{"endpoint": "tcp://*:5557"}],
    }
    replica = read_replica(data)
    assert isinstance(replica, ReplicaConfig)
    assert (replica.replica_id, replica.api_key) == ("r", SecretStr("sk-1"))


@pytest.mark.parametrize("host", ["fd00::5", "::ffff:10.0.0.5", "10.0.0.5", "engine-0.a", "*"])
def test_a_peer_may_have_any_address(host: str) -> None:
    """A replica's URL may hold an IPv6 address; a request names one without brackets."""
    for written in {host, f"[{host}]" if ":" in host else host}:
        replica = read_replica({"url": "http://h:1", "p2p": {"host": written, "port": 7777}})
        assert replica.p2p is not None
        assert replica.p2p.host == host


@pytest.mark.parametrize("host", ["10.0.0.5:7777", "fd00:::5", "[fd00::5", "a:b", "", "a b"])
def test_what_is_no_address_of_a_peer_is_refused(host: str) -> None:
    """An engine would refuse each request that names it."""
    with pytest.raises(BadRequest, match=r"p2p\.host"):
        read_replica({"url": "http://h:1", "p2p": {"host": host, "port": 1}})


def test_the_schema_of_a_replica_says_what_it_may_hold() -> None:
    """It is what /docs shows for POST /replicas."""
    schema = ReplicaConfig.model_json_schema()
    assert schema["required"] == ["url"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["speed"]["maximum"] == 1000


def test_a_request_cannot_read_the_routers_environment() -> None:
    """It would send any variable, as a key, to any URL."""
    with pytest.raises(
        BadRequest, match=r"\$\.api_key: a \$\{\.\.\.\}; environment variables can be named"
    ) as caught:
        read_replica({"url": "http://h:1", "api_key": "${HOME}"})
    assert caught.value.status == 400


def test_a_wrong_replica_in_a_request_is_answered_with_every_problem() -> None:
    """One round of mending is enough."""
    with pytest.raises(BadRequest) as caught:
        read_replica({"url": "h:1", "sped": 1, "api_key": "two words"})
    assert str(caught.value) == (
        "$.sped: unknown key; did you mean speed?;"
        f" $.url: 'h:1' must begin with http:// or https://; $.api_key: {NO_KEY}"
    )
    assert (caught.value.type, caught.value.code) == ("invalid_request_error", "invalid_value")
    with pytest.raises(BadRequest, match=r"\$: a list of 0; expected a mapping"):
        read_replica([])


@pytest.mark.parametrize("path", ["/pooling", "/v2/*", "/a/b-c/*"])
def test_paths_to_pass_on_may_be_added(path: str) -> None:
    """Engines offer more than any router knows."""
    config = RouterConfig.from_yaml(f"server: {{extra_paths: ['{path}']}}", {})
    assert config.server.extra_paths == (path,)


@pytest.mark.parametrize(
    "path", ["pooling", "/a*b", "/a?b=1", "/a//b", "/*", "/replicas", "/replicas/x", "/v1/models/x"]
)
def test_what_the_router_answers_itself_cannot_be_passed_on(path: str) -> None:
    """The path would be shadowed, or shadow an endpoint of the router."""
    with pytest.raises(ConfigError) as error:
        RouterConfig.from_yaml(f"server: {{extra_paths: ['{path}']}}", {})
    assert "server.extra_paths[0]" in str(error.value)


def test_who_connects_to_the_router_needs_an_address_there() -> None:
    """Of its rank, too; and there nobody shows a key."""
    replica = "replicas: [{url: 'http://a:1', kv_events: [{endpoint: listen, dp_rank: %d}]}]"
    assert problems(replica % 0) == [
        "replicas[0].kv_events[0].endpoint: listen; there must be events.listen for that"
    ]
    listen = "events: {listen: 'tcp://*:5557', listen_ranks: 2}\n"
    assert problems(listen + replica % 2) == [
        "replicas[0].kv_events[0].dp_rank: 2; must be below events.listen_ranks (2)"
    ]
    keyed = replica.replace("dp_rank: %d", "server_key: '" + "k" * 40 + "'")
    rule = "who connects to the router shows no key; must be left out"
    assert f"replicas[0].kv_events[0].server_key: {rule}" in problems(listen + keyed)
    (found,) = problems("events: {listen_ranks: 2}")
    assert found == "events.listen_ranks: there must be events.listen for that"
    keys = {"curve_keys": "k", "curve_server_key": zmq.curve_keypair()[0].decode()}
    (found,) = problems(yaml.safe_dump({"events": {"listen": "tcp://*:5557", **keys}}))
    assert found.startswith("events.listen: events.curve_server_key is set, and")
    pods = "discovery: {dns: [{name: a, port: 1, replica: {kv_events: [{endpoint: listen}]}}]}"
    (found,) = problems(pods)
    assert found.startswith("discovery.dns[0].replica.kv_events[0].endpoint: listen; there must be")


def test_a_public_key_may_look_as_if_it_named_a_variable() -> None:
    """One in a few hundred does; a variable in its place is refused all the same."""
    key = "${a}" + "0" * 36
    config = RouterConfig.model_validate({"events": {"curve_keys": "k", "curve_server_key": key}})
    assert config.events.curve_server_key == key
    given = {"curve_keys": "k", "curve_server_key": "${PUBLIC_KEY}"}
    (found,) = problems(yaml.safe_dump({"events": given}))
    rule = "holds a ${...}; environment variables are for API keys only"
    assert found == f"events.curve_server_key: {rule}"


@pytest.mark.parametrize("address", ["tcp://a:99999", "tcp://a:1:2", "tcp://::1:5557"])
def test_an_address_that_no_socket_takes_is_refused(address: str) -> None:
    """It would be found out when its stream is to be followed, or the router to listen there."""
    source = {"endpoint": address, "replay_endpoint": address}
    document = {"replicas": [{"url": "http://a:1", "kv_events": [source]}]}
    found = problems(yaml.safe_dump({**document, "events": {"listen": address}}))
    source_place = "replicas[0].kv_events[0]"
    places = (f"{source_place}.endpoint", f"{source_place}.replay_endpoint", "events.listen")
    for place, problem in zip(places, found, strict=True):
        assert problem.startswith(f"{place}: {address!r}; expected tcp://host:port")


def test_every_rank_that_is_listened_for_has_a_port() -> None:
    """A start would end with a traceback."""
    (found,) = problems("events: {listen: 'tcp://*:65535', listen_ranks: 2}")
    rule = "the data-parallel rank's port 65536 must not lie above 65535"
    assert found == f"events.listen_ranks: tcp://*:65535: {rule}"
    for listen in ("tcp://*:0", "tcp://*:65534", "ipc:///run/kvroute"):
        read(yaml.safe_dump({"events": {"listen": listen, "listen_ranks": 2}}))


def test_a_publishers_key_without_our_own_is_refused_wherever_a_source_can_stand() -> None:
    """Its stream would be followed in plain text, and nothing would say so."""
    source = {"endpoint": "tcp://*:5557", "server_key": zmq.curve_keypair()[0].decode()}
    replica = {"kv_events": [source]}
    dns = {"name": "a", "port": 1, "replica": replica}
    pods = {"selector": "app=a", "replica": replica}
    document = {
        "replicas": [{"url": "http://a:1", **replica}],
        "discovery": {"dns": [dns], "kubernetes": [pods]},
    }
    places = ("replicas[0]", "discovery.dns[0].replica", "discovery.kubernetes[0].replica")
    rule = "there must be events.curve_keys for that"
    assert problems(yaml.safe_dump(document)) == [
        f"{place}.kv_events[0].server_key: {rule}" for place in places
    ]
    document["events"] = {"curve_keys": "k"}
    read(yaml.safe_dump(document))


def test_a_source_that_is_asked_has_a_path_and_nothing_of_a_stream() -> None:
    """TensorRT-LLM's; what would come to nothing is refused."""
    replica = "replicas: [{url: 'http://a:1', kv_events: [{endpoint: '%s'%s}]}]"
    for address in ("http://*:8000/kv_cache_events", "https://b/kv_cache_events"):
        source = {"endpoint": address, "dp_rank": 1}
        read_replica({"url": "http://a:1", "kv_events": [source]})
    for address, rule in (
        ("http://*:8000", "expected a path, such as /kv_cache_events"),
        ("http://*:99999/x", "is not a URL"),
        ("http://user:key@b:1/x", "must hold no user and no password"),
        ("http://b:1/x?y=1", "must have neither a query nor a fragment"),
    ):
        (found,) = problems(replica % (address, ""))
        assert found.startswith("replicas[0].kv_events[0].endpoint: ")
        assert rule in found
    for name, value in (("topic", "t"), ("replay_endpoint", "'tcp://*:1'")):
        (found,) = problems(replica % ("http://*:8000/x", f", {name}: {value}"))
        rule = "must be left out where the endpoint is asked over HTTP"
        assert found == f"replicas[0].kv_events[0].{name}: {rule}"


def test_options_of_the_picker_that_would_come_to_another_endpoints_port_are_refused() -> None:
    """The gateway tries a fallback with the headers of the first."""
    place = "doors.ext_proc."
    (found,) = problems("doors: {ext_proc: {rank_ports: true, fallbacks: 1}}")
    rule = "a rank's port is that of one endpoint: fallbacks must be 0"
    assert found == f"{place}rank_ports: true; {rule}"
