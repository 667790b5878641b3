"""Pods, endpoints and pools are followed through everything an API server does."""

from __future__ import annotations

import json
import ssl
import sys
from pathlib import Path
from random import Random

import pytest
import trustme
from async_timeout import timeout

from router.config.discovery import KubernetesDiscovery
from router.config.replica import ReplicaOptions
from router.fleet.discovery.kubernetes import KubernetesProvider
from tests.router.fleet.discovery.found import Found, following
from tests.router.raw_http import answer, answering, raw_server
from tests.support.kubernetes_api import PODS, POOLS, SLICES, ApiServer, api_server, pod
from tests.support.waiting import DEADLINE_S, eventually

NAMESPACE = "models"
PATH = PODS.format(NAMESPACE)


def provider(url: str, **options: object) -> KubernetesProvider:
    chosen = {} if {"service", "pool"} & options.keys() else {"selector": "app=vllm"}
    config = KubernetesDiscovery.model_validate(
        {"namespace": NAMESPACE, "api_server": url, **chosen, **options}
    )
    return KubernetesProvider(config, {})


async def test_ready_pods_of_the_selector_are_replicas() -> None:
    """Others of the namespace, those that are not ready, and those that end are not."""
    async with api_server() as (server, url):
        await server.put(PATH, pod("vllm-0", "10.0.0.1"))
        await server.put(PATH, pod("vllm-1", "fd00::1"))
        await server.put(PATH, pod("starting", "10.0.0.3", ready=False))
        await server.put(PATH, pod("ending", "10.0.0.4", deletionTimestamp="2026-01-01T00:00:00Z"))
        await server.put(PATH, pod("redis", "10.0.0.5", labels={"app": "redis"}))
        async with following(provider(url)) as found:
            await eventually(lambda: found.lists, "a list")
            assert found.urls == {
                "vllm-0": "http://10.0.0.1:8000",
                "vllm-1": "http://[fd00::1]:8000",
            }


async def test_a_pod_is_followed_from_its_start_to_its_end() -> None:
    """Ready, not ready, ready again at another address, terminating, gone."""
    async with api_server() as (server, url), following(provider(url)) as found:
        await server.put(PATH, pod("vllm-0", ready=False))
        await eventually(lambda: found.lists, "a list")
        assert found.urls == {}
        await server.put(PATH, pod("vllm-0"))
        await eventually(lambda: found.urls == {"vllm-0": "http://10.0.0.1:8000"}, "ready")
        await server.put(PATH, pod("vllm-0", ready=False))
        await eventually(lambda: found.urls == {}, "not ready")
        await server.put(PATH, pod("vllm-0", "10.0.0.9"))
        await eventually(lambda: found.urls == {"vllm-0": "http://10.0.0.9:8000"}, "moved")
        await server.put(PATH, pod("vllm-0", "10.0.0.9", deletionTimestamp="2026-01-01T00:00:00Z"))
        await eventually(lambda: found.urls == {}, "terminating")
        await server.delete(PATH, "vllm-0")
        await server.put(PATH, pod("vllm-1"))
        await eventually(lambda: list(found.urls) == ["vllm-1"], "another")


async def test_a_cut_watch_resumes_where_it_was_cut() -> None:
    """Nothing is listed again, and what changed meanwhile is not missed."""
    async with api_server() as (server, url), following(provider(url)) as found:
        await server.put(PATH, pod("vllm-0"))
        await eventually(lambda: "vllm-0" in found.urls and server.watches, "watching")
        await server.cut_watches()
        await server.put(PATH, pod("vllm-1", "10.0.0.2"))
        await server.delete(PATH, "vllm-0")
        await eventually(lambda: list(found.urls) == ["vllm-1"], "resumed")
        listed = [target for target in server.requests if "watch=" not in target]
        assert len(listed) == 1, listed


@pytest.mark.skipif(sys.platform != "linux", reason="packets are dropped as Linux can")
async def test_a_watch_whose_server_is_gone_without_a_word_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a cut cable, or a load balancer that forgot the connection: it would be waited for
    until the watch should have ended, minutes later."""
    monkeypatch.setattr("router.fleet.discovery.kubernetes_api.LOST_S", 4)
    async with api_server() as (server, url), following(provider(url)) as found:
        await server.put(PATH, pod("vllm-0"))
        await eventually(lambda: "vllm-0" in found.urls and server.watches, "watching")
        server.vanish()
        await server.put(PATH, pod("vllm-1", "10.0.0.2"))
        await eventually(lambda: "vllm-1" in found.urls, "watching again")


async def test_a_version_that_is_too_old_is_listed_again() -> None:
    """410 Gone comes as an event of the watch; what was deleted meanwhile is noticed."""
    async with api_server() as (server, url), following(provider(url)) as found:
        await server.put(PATH, pod("vllm-0"))
        await server.put(PATH, pod("vllm-1", "10.0.0.2"))
        await eventually(lambda: len(found.urls) == 2 and server.watches, "watching")
        server.fail_with = 503
        await server.cut_watches()
        await eventually(lambda: found.failures, "the server is away")
        await server.delete(PATH, "vllm-0")
        await server.compact()
        server.fail_with = None
        await eventually(lambda: list(found.urls) == ["vllm-1"], "listed again")


async def test_bookmarks_move_a_watch_on() -> None:
    """After one a watch resumes from it, though nothing else has changed since the list."""
    async with api_server() as (server, url), following(provider(url)) as found:
        await server.put(PATH, pod("vllm-0"))
        await eventually(lambda: found.urls and server.watches, "watching")
        lists = len(found.lists)
        await server.bookmark(PATH)
        await eventually(lambda: len(found.lists) > lists, "the bookmark")
        await server.cut_watches()
        await eventually(
            lambda: f"resourceVersion={server.version}" in server.requests[-1], "resumed"
        )
        assert sum("watch=" not in target for target in server.requests) == 1


async def test_a_server_that_is_away_empties_no_list() -> None:
    """The last list stays, the reason is told, and it is asked again, later each time."""
    async with api_server() as (server, url), following(provider(url)) as found:
        await server.put(PATH, pod("vllm-0"))
        await eventually(lambda: found.urls and server.watches, "watching")
        server.fail_with = 500
        await server.cut_watches()
        await eventually(lambda: len(found.failures) >= 2, "failures")
        assert "status 500" in found.failures[-1]
        assert found.urls == {"vllm-0": "http://10.0.0.1:8000"}
        server.fail_with = None
        await server.put(PATH, pod("vllm-1", "10.0.0.2"))
        await eventually(lambda: len(found.urls) == 2, "back")


async def test_a_wrong_token_is_told_and_a_renewed_one_is_read(tmp_path: Path) -> None:
    """Tokens of service accounts are renewed in their file."""
    token = tmp_path / "token"
    token.write_text("old\n")
    async with api_server(token="new") as (server, url):
        await server.put(PATH, pod("vllm-0"))
        async with following(provider(url, token_file=str(token))) as found:
            await eventually(lambda: found.failures, "refused")
            assert "status 401: Unauthorized" in found.failures[0]
            assert "old" not in "".join(found.failures)
            token.write_text("new\n")
            await eventually(lambda: found.urls, "let in")


async def test_an_annotation_says_what_is_true_of_one_pod() -> None:
    """It overrides what is configured for all; one that breaks a rule leaves out its pod only."""
    options = ReplicaOptions(speed=2.0, models=("llama",))
    said = {"port": 9000, "scheme": "https", "path": "/engine", "speed": 0.5}
    async with api_server() as (server, url):
        await server.put(PATH, pod("plain"))
        await server.put(
            PATH,
            pod("said", "10.0.0.2", annotations={"kvroute.io/replica": json.dumps(said)}),
        )
        await server.put(
            PATH, pod("broken", "10.0.0.3", annotations={"kvroute.io/replica": '{"sped": 1}'})
        )
        await server.put(
            PATH, pod("no-json", "10.0.0.4", annotations={"kvroute.io/replica": "speed=1"})
        )
        await server.put(PATH, pod("no-port", "10.0.0.5", port=None))
        async with following(provider(url, replica=options)) as found:
            await eventually(lambda: found.lists, "a list")
            assert found.urls == {
                "plain": "http://10.0.0.1:8000",
                "said": "https://10.0.0.2:9000/engine",
            }
            assert (found.replicas["plain"].speed, found.replicas["said"].speed) == (2.0, 0.5)
            assert found.replicas["said"].models == ("llama",)
            assert [text.split(":")[0] for text in found.broken] == [
                "pod broken",
                "pod no-json",
                "pod no-port",
            ]
            assert "sped: unknown key; did you mean speed?" in found.broken[0]


async def test_llm_d_s_label_says_a_pod_s_role() -> None:
    """A pod that is set up for llm-d needs nothing else; what only encodes images takes no
    requests, and another word may mean anything."""
    said = {"kvroute.io/replica": json.dumps({"role": "both"})}
    roles = {
        "prefill": "prefill",
        "decode": "decode",
        "both": "both",
        "prefill-decode": "both",
        "encode-prefill": "prefill",
        "encode-decode": "decode",
        "encode-prefill-decode": "both",
    }
    async with api_server() as (server, url):
        for place, label in enumerate((*roles, "encode", "draft")):
            labels = {"llm-d.ai/role": label}
            await server.put(PATH, pod(label, f"10.0.1.{place}", labels=labels))
        await server.put(PATH, pod("unlabelled", "10.0.2.1"))
        overridden = pod("overridden", "10.0.2.2", labels={"llm-d.ai/role": "prefill"})
        overridden["metadata"]["annotations"] = said
        await server.put(PATH, overridden)
        options = ReplicaOptions(role="decode")
        async with following(provider(url, replica=options)) as found:
            await eventually(lambda: found.lists, "a list")
            assert {name: each.role for name, each in found.replicas.items()} == {
                **roles,
                "unlabelled": "decode",
                "overridden": "both",
            }
            assert [text.partition(";")[0] for text in found.broken] == [
                "pod draft: label llm-d.ai/role: 'draft'"
            ]
            labels = {"llm-d.ai/role": "decode"}
            await server.put(PATH, pod("prefill", "10.0.1.0", labels=labels))
            await eventually(lambda: found.replicas["prefill"].role == "decode", "another role")


async def test_a_pods_engine_may_connect_to_the_router() -> None:
    """Its events come to an address of the router's own machine, and that is meant."""
    said = {"kvroute.io/replica": json.dumps({"kv_events": [{"endpoint": "listen"}]})}
    async with api_server() as (server, url):
        await server.put(PATH, pod("connects", annotations=said))
        async with following(provider(url, replica=ReplicaOptions())) as found:
            await eventually(lambda: found.lists, "a list")
            assert (list(found.replicas), list(found.broken)) == (["connects"], [])


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "[::1]", "127.0.0.1.nip.io", "169.254.169.254", "10.0.0.9", "a.svc"],
)
async def test_a_pods_engine_is_asked_for_its_events_at_the_pods_own_address_only(
    host: str,
) -> None:
    """An annotation must not have the router send requests to other places, where it may be
    trusted; a name may lead to its own machine."""
    async with api_server() as (server, url):
        for name, asked in (("asked", "*"), ("misled", host)):
            sources = [{"endpoint": f"http://{asked}:8000/kv_cache_events"}]
            said = {"kvroute.io/replica": json.dumps({"kv_events": sources})}
            await server.put(PATH, pod(name, annotations=said))
        async with following(provider(url, replica=ReplicaOptions())) as found:
            await eventually(lambda: found.broken, "a list")
            assert list(found.replicas) == ["asked"]
            assert "a pod is asked at its own address: its host must be *" in found.broken[0]


@pytest.mark.parametrize("options", [{}, {"pool": "llama"}], ids=["selector", "pool"])
async def test_an_annotation_made_to_break_the_reader_leaves_out_only_its_pod(
    options: dict[str, object],
) -> None:
    """Whoever may annotate one pod must not end the discovery of all others."""
    pools = POOLS.format(NAMESPACE)
    async with api_server() as (server, url):
        spec = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}]}
        await server.put(pools, {"metadata": {"name": "llama"}, "spec": spec})
        await server.put(PATH, pod("vllm-0"))
        async with following(provider(url, **options)) as found:
            await eventually(lambda: list(found.urls) == ["vllm-0"], "the one")
            for place, deep in enumerate(("[" * 100_000, '{"speed":' * 20_000)):
                annotations = {"kvroute.io/replica": deep}
                await server.put(PATH, pod(f"deep-{place}", annotations=annotations))
            await server.put(PATH, pod("vllm-1", "10.0.0.2"))
            await eventually(lambda: list(found.urls) == ["vllm-0", "vllm-1"], "the other")
            assert [text[:10] for text in found.broken] == ["pod deep-0", "pod deep-1"]


async def test_an_annotation_cannot_name_a_socket_of_the_routers_own_machine() -> None:
    """A pod is elsewhere: what it names must be reached over the network."""
    names = {"ipc": "ipc:///run/other.sock", "loop": "tcp://127.1:5557", "tcp": "tcp://*:5557"}
    async with api_server() as (server, url):
        for name, endpoint in names.items():
            annotations = {
                "kvroute.io/replica": json.dumps({"kv_events": [{"endpoint": endpoint}]})
            }
            await server.put(PATH, pod(name, annotations=annotations))
        async with following(provider(url)) as found:
            await eventually(lambda: found.lists, "a list")
            assert list(found.urls) == ["tcp"]
            for text, endpoint in zip(found.broken, names.values(), strict=False):
                assert f"kv_events[0].endpoint: '{endpoint}'; is on the router's own" in text


async def test_an_object_that_cannot_be_read_leaves_out_only_itself() -> None:
    """A field of another type than the API's documentation says."""
    async with api_server() as (server, url):
        odd = pod("odd")
        odd["status"]["podIP"] = 7
        await server.put(PATH, odd)
        await server.put(PATH, pod("vllm-0"))
        async with following(provider(url)) as found:
            await eventually(lambda: list(found.urls) == ["vllm-0"], "the other")
            assert found.broken[0].startswith("odd: ")


@pytest.mark.parametrize("status", ["200 OK", "503 Service Unavailable"])
async def test_an_answer_that_is_no_text_is_a_failure_like_any_other(status: str) -> None:
    """What stands between the router and the API server may say anything; the provider ended."""
    body = b'{"message": "\xff", "metadata": {"resourceVersion": "\xff"}}'
    nonsense = answering(answer(body, status))
    async with raw_server(nonsense) as server, following(provider(server.url)) as found:
        await eventually(lambda: len(found.failures) > 1, "it asks again")


async def test_the_endpoints_of_a_service_are_replicas() -> None:
    """Over all its slices; ready ones, and those whose readiness is not known."""
    path = SLICES.format(NAMESPACE)
    labels = {"kubernetes.io/service-name": "engines"}
    ports = [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9000}]

    def endpoint(name: str, address: str, **conditions: bool) -> dict[str, object]:
        return {
            "addresses": [address],
            "conditions": conditions,
            "targetRef": {"kind": "Pod", "name": name},
        }

    async with api_server() as (server, url):
        one = [endpoint("a", "10.0.0.1", ready=True), endpoint("b", "10.0.0.2", ready=False)]
        two = [endpoint("c", "10.0.0.3"), endpoint("d", "10.0.0.4", ready=True, terminating=True)]
        for name, endpoints in (("one", one), ("two", two), ("empty", None)):
            await server.put(
                path,
                {
                    "metadata": {"name": name, "labels": labels},
                    "endpoints": endpoints,
                    "ports": ports,
                },
            )
        async with following(provider(url, service="engines", port="http")) as found:
            await eventually(lambda: found.lists, "a list")
            assert found.urls == {"a": "http://10.0.0.1:8000", "c": "http://10.0.0.3:8000"}


async def test_an_inference_pool_is_followed_when_its_selector_changes() -> None:
    """The Gateway API's pool: each of its target ports is a replica of its own."""
    path = POOLS.format(NAMESPACE)

    def pool(app: str, *ports: int) -> dict[str, object]:
        selector = {"matchLabels": {"app": app}}
        spec = {"selector": selector, "targetPorts": [{"number": port} for port in ports]}
        return {"metadata": {"name": "llama"}, "spec": spec}

    async with api_server() as (server, url):
        await server.put(PATH, pod("vllm-0", "10.0.0.1"))
        await server.put(PATH, pod("sglang-0", "10.0.0.2", labels={"app": "sglang"}))
        async with following(provider(url, pool="llama")) as found:
            await eventually(lambda: found.failures, "no pool yet")
            await server.put(path, pool("vllm", 8000, 8001))
            expected = {
                "vllm-0:8000": "http://10.0.0.1:8000",
                "vllm-0:8001": "http://10.0.0.1:8001",
            }
            await eventually(lambda: found.urls == expected, "the pool's pods")
            await server.put(path, pool("sglang", 8000))
            await eventually(lambda: found.urls == {"sglang-0": "http://10.0.0.2:8000"}, "changed")
            failures = len(found.failures)
            nothing = {"selector": {"matchLabels": {}}, "targetPorts": [{"number": 8000}]}
            await server.put(path, {"metadata": {"name": "llama"}, "spec": nothing})
            await eventually(lambda: found.failures[failures:], "refused")
            assert "its selector has no labels" in found.failures[-1], (
                "to the API server it would mean every pod of the namespace"
            )
            assert list(found.urls) == ["sglang-0"]
            lists = len(found.lists)
            await server.put(path, pool("sglang", 8000))
            await eventually(lambda: found.lists[lists:], "it is as before: all is well again")


def watches(server: ApiServer, path: str) -> int:
    """How often a collection was asked to be watched."""
    return sum(each.startswith(f"{path}?") and "watch=1" in each for each in server.requests)


async def test_reports_of_its_pods_do_not_hide_what_is_wrong_with_a_pool() -> None:
    """Pods change all the time: the failure would be shown for a moment only."""
    path = POOLS.format(NAMESPACE)
    spec = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}]}
    pool = {"metadata": {"name": "llama"}, "spec": spec}
    async with api_server() as (server, url):
        await server.put(PATH, pod("vllm-0", "10.0.0.1"))
        await server.put(path, pool)
        async with following(provider(url, pool="llama")) as found:
            await eventually(lambda: found.lists, "its pods")
            assert not found.broken
            await server.delete(path, "llama")
            await eventually(lambda: found.failures, "it is gone")
            await server.put(PATH, pod("vllm-1", "10.0.0.2"))
            await eventually(lambda: "vllm-1" in found.replicas, "its pods are followed")
            assert list(found.broken) == ["InferencePool llama: no pool of this name"]
            await server.put(path, pool)
            await eventually(lambda: not found.broken, "all is well")
            await eventually(lambda: watches(server, PATH) == 2, "they are watched anew")
            failures = len(found.failures)
            await server.cut_watches()
            await eventually(lambda: len(found.failures) == failures + 2, "both are cut")
            await server.put(PATH, pod("vllm-2", "10.0.0.3"))
            await eventually(lambda: found.broken, "the pods are watched, the pool is perhaps not")
            await server.bookmark(path)
            await eventually(lambda: not found.broken, "it is watched again")
            assert set(found.replicas) == {"vllm-0", "vllm-1", "vllm-2"}


async def test_a_pool_whose_pods_are_followed_no_more_ends_with_the_reason() -> None:
    """A bug in what takes the list, say: unseen, the pods of that moment would be served for
    ever."""

    class Broken(Found):
        def on_replicas(self, *_: object) -> None:
            raise ZeroDivisionError

    spec = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}]}
    async with api_server() as (server, url):
        await server.put(PATH, pod("vllm-0", "10.0.0.1"))
        await server.put(POOLS.format(NAMESPACE), {"metadata": {"name": "llama"}, "spec": spec})
        async with timeout(DEADLINE_S):
            with pytest.raises(ZeroDivisionError):
                await provider(url, pool="llama").follow(Broken())


async def test_a_storm_of_two_hundred_pods_ends_in_the_truth() -> None:
    """They come, go, lose readiness and change address while watches are cut and versions
    compacted."""
    random = Random(7)
    async with api_server() as (server, url), following(provider(url)) as found:
        alive: dict[str, tuple[str, bool]] = {}
        for number in range(1_000):
            name = f"vllm-{random.randrange(200)}"
            if name in alive and random.random() < 0.3:
                del alive[name]
                await server.delete(PATH, name)
            else:
                place = f"10.0.{random.randrange(256)}.{random.randrange(1, 255)}"
                alive[name] = place, random.random() < 0.8
                await server.put(PATH, pod(name, place, ready=alive[name][1]))
            if number % 97 == 0:
                await server.cut_watches()
            if number % 301 == 0:
                await server.compact()
        expected = {name: f"http://{place}:8000" for name, (place, ok) in alive.items() if ok}
        await eventually(lambda: found.urls == expected, "the truth")


async def test_the_files_of_the_account_may_come_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that was half written when the router started kept it from all pods until a restart."""
    monkeypatch.setattr("router.fleet.discovery.kubernetes.MAX_RETRY_S", 0.01)
    path = tmp_path / "ca.crt"
    path.write_text("-----BEGIN CERT")
    async with api_server() as (server, url):
        await server.put(PATH, pod("vllm-0"))
        async with following(provider(url, ca_file=str(path))) as found:
            await eventually(lambda: found.failures, "it cannot be used")
            assert "ca_file" in found.failures[0]
            path.write_bytes(trustme.CA().cert_pem.bytes())
            await eventually(lambda: list(found.urls) == ["vllm-0"], "it is read")


async def test_an_authority_of_the_cluster_may_change(tmp_path: Path) -> None:
    """Its file holds the new one in time. Read once, it kept a router that ran on from all pods
    that came later."""
    first, second = trustme.CA(), trustme.CA()
    path = tmp_path / "ca.crt"
    first.cert_pem.write_to_path(path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    first.issue_cert("127.0.0.1").configure_cert(tls)
    server = ApiServer()
    url = f"https://127.0.0.1:{await server.start(tls)}"
    try:
        await server.put(PATH, pod("vllm-0"))
        async with following(provider(url, ca_file=str(path))) as found:
            await eventually(lambda: list(found.urls) == ["vllm-0"], "the first list")
            second.issue_cert("127.0.0.1").configure_cert(tls)
            second.cert_pem.write_to_path(path)
            await server.cut_watches()
            await server.put(PATH, pod("vllm-1", "10.0.0.2"))
            await eventually(lambda: "vllm-1" in found.urls, "it is followed on")
    finally:
        await server.stop()


async def test_outside_a_cluster_it_says_what_is_missing() -> None:
    """Instead of an end, or of silence."""
    config = KubernetesDiscovery(selector="app=vllm")
    async with following(KubernetesProvider(config, {})) as found:
        await eventually(lambda: found.failures, "a reason")
        assert found.failures == ["not inside a cluster, and no api_server is configured"]
