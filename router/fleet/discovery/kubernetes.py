"""Replicas from Kubernetes: the ready pods of a label selector, the endpoints of a service, or the
pods of an InferencePool."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from pydantic import ValidationError

from kvevents.listener import LISTENED_TO
from kvevents.pacing import Backoff
from router.config.discovery import KubernetesDiscovery, Scheme, TcpPort
from router.config.document import problems_in, stamp_of
from router.config.origin import Origin, in_url
from router.config.replica import ReplicaConfig, ReplicaOptions
from router.config.section import Location, Role
from router.config.values import POLLED, UrlPath, has_wildcard_host, is_local_endpoint
from router.fleet.discovery.kubernetes_api import (
    Collection,
    KubernetesApi,
    KubernetesError,
    Metadata,
)
from router.fleet.discovery.provider import FIRST_RETRY_S, MAX_RETRY_S, ProviderListener

ANNOTATION = "kvroute.io/replica"
ROLE_LABEL = "llm-d.ai/role"
"""llm-d's label for the role of its pods."""
_ROLES: Mapping[str, Role | None] = {
    "both": "both",
    "decode": "decode",
    "encode": None,
    "encode-decode": "decode",
    "encode-prefill": "prefill",
    "encode-prefill-decode": "both",
    "prefill": "prefill",
    "prefill-decode": "both",
}
"""None: it computes neither prompts nor responses."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


# --- the API's objects, as far as they are read ---------------------------------------------------


class _Condition(msgspec.Struct, frozen=True):
    type: str
    status: str


class _ContainerPort(msgspec.Struct, rename="camel", frozen=True):
    container_port: int
    name: str | None = None


class _Container(msgspec.Struct, frozen=True):
    ports: tuple[_ContainerPort, ...] | None = None


class _PodSpec(msgspec.Struct, frozen=True):
    containers: tuple[_Container, ...] = ()


class _PodStatus(msgspec.Struct, frozen=True):
    ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: tuple[_Condition, ...] | None = None


class _Pod(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()

    @property
    def is_ready(self) -> bool:
        return self.metadata.deletion_timestamp is None and any(
            condition.type == "Ready" and condition.status == "True"
            for condition in self.status.conditions or ()
        )


class _EndpointConditions(msgspec.Struct, frozen=True):
    ready: bool | None = None
    terminating: bool | None = None


class _Target(msgspec.Struct, frozen=True):
    name: str = ""


class _Endpoint(msgspec.Struct, rename="camel", frozen=True):
    addresses: tuple[str, ...]
    conditions: _EndpointConditions = _EndpointConditions()
    target_ref: _Target | None = None


class _EndpointPort(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class _EndpointSlice(msgspec.Struct, frozen=True):
    metadata: Metadata
    endpoints: tuple[_Endpoint, ...] | None = None
    ports: tuple[_EndpointPort, ...] | None = None


class _PoolPort(msgspec.Struct, frozen=True):
    number: int


class _PoolSelector(msgspec.Struct, rename="camel", frozen=True):
    match_labels: dict[str, str]


class _PoolSpec(msgspec.Struct, rename="camel", frozen=True):
    selector: _PoolSelector
    target_ports: tuple[_PoolPort, ...] = ()


class _Pool(msgspec.Struct, frozen=True):
    """gateway-api-inference-extension, inference.networking.k8s.io/v1."""

    metadata: Metadata
    spec: _PoolSpec

    @property
    def label_selector(self) -> str:
        """The selector of its pods, as a query has it."""
        labels = sorted(self.spec.selector.match_labels.items())
        return ",".join(f"{name}={value}" for name, value in labels)

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports at which each of its pods is a replica."""
        return tuple(port.number for port in self.spec.target_ports)


# --- pods to replicas -----------------------------------------------------------------------------


class _PodOptions(ReplicaOptions, frozen=True):
    """Holds the options of a pod's annotation."""

    port: TcpPort | None = None
    scheme: Scheme | None = None
    path: UrlPath | None = None

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Refuse event streams on the router's own machine, and requests to anywhere but the
        pod."""
        yield from super().contradictions()
        for index, source in enumerate(self.kv_events or ()):
            if source.endpoint.startswith(POLLED):
                if not has_wildcard_host(source.endpoint):
                    rule = "a pod is asked at its own address: its host must be *"
                    yield ("kv_events", index, "endpoint"), f"{source.endpoint!r}; {rule}"
                continue
            for name in ("endpoint", "replay_endpoint", "snapshot_endpoint"):
                address = getattr(source, name)
                if address not in (None, LISTENED_TO) and is_local_endpoint(address):
                    rule = "is on the router's own machine; a pod's must be tcp:// and elsewhere"
                    yield ("kv_events", index, name), f"{address!r}; {rule}"


class _PodPlace(NamedTuple):
    """The place of a replica by the API."""

    name: str
    address: str
    ports: tuple[int, ...]
    annotation: str | None = None
    role: str | None = None
    """The value of its label."""


class KubernetesProvider:
    """Follows pods, endpoints or a pool."""

    def __init__(self, config: KubernetesDiscovery, environ: Mapping[str, str]) -> None:
        self.name = config.title
        self._config = config
        self._environ = environ
        self._made: dict[_PodPlace, tuple[ReplicaConfig, ...] | str] = {}
        """The parts of the last report: most places stay when one changes."""

    async def follow(self, listener: ProviderListener) -> None:
        while True:
            try:
                api = KubernetesApi(*_connection(self._config, self._environ))
                namespace = self._config.namespace or _own_namespace()
                break
            except KubernetesError as error:
                listener.on_failure(str(error))
                await asyncio.sleep(MAX_RETRY_S)  # the account's files may come later
        try:
            if self._config.pool:
                await self._follow_pool(api, namespace, listener)
            elif self._config.service:
                await self._follow_service(api, namespace, listener)
            else:
                await self._follow_pods(api, namespace, self._config.selector or "", (), listener)
        finally:
            await api.close()

    async def _follow_pods(
        self,
        api: KubernetesApi,
        namespace: str,
        selector: str,
        ports: Sequence[int],
        listener: ProviderListener,
    ) -> None:
        path = f"/api/v1/namespaces/{namespace}/pods"
        pods = Collection(api, path, {"labelSelector": selector}, _Pod, _retry())

        def report() -> None:
            places = filter(None, (self._place(pod, ports) for pod in pods.objects.values()))
            self._report(places, pods.unreadable, listener)

        await pods.follow(report, listener.on_failure)

    async def _follow_service(
        self, api: KubernetesApi, namespace: str, listener: ProviderListener
    ) -> None:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        selector = f"kubernetes.io/service-name={self._config.service}"
        slices = Collection(api, path, {"labelSelector": selector}, _EndpointSlice, _retry())

        def report() -> None:
            places = (place for each in slices.objects.values() for place in self._places(each))
            self._report(places, slices.unreadable, listener)

        await slices.follow(report, listener.on_failure)

    async def _follow_pool(
        self, api: KubernetesApi, namespace: str, listener: ProviderListener
    ) -> None:
        path = f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools"
        name = self._config.pool or ""
        selector = {"fieldSelector": f"metadata.name={name}"}
        pools = Collection(api, path, selector, _Pool, _retry())
        reports = _PoolReports(listener)
        followed: _Pool | None = None
        pods: asyncio.Task[None] | None = None
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def follow_pods(pool: _Pool) -> asyncio.Task[None]:
            following = self._follow_pods(api, namespace, pool.label_selector, pool.ports, reports)
            task = asyncio.create_task(following)
            task.add_done_callback(lambda task: _pass_on(task, ended))
            return task

        def changed() -> None:
            nonlocal followed, pods
            pool = _usable_pool(pools, name)
            if isinstance(pool, str):
                # Its pods are still followed, and listed anew once it can be used.
                followed = None
                reports.on_pool(f"InferencePool {name}: {pool}")
                return
            reports.on_pool(None)
            if followed is None or pool.spec != followed.spec:
                if pods is not None:
                    pods.cancel()
                followed, pods = pool, follow_pods(pool)

        following_pool = asyncio.create_task(pools.follow(changed, reports.on_pool))
        following_pool.add_done_callback(lambda task: _pass_on(task, ended))
        try:
            await ended
        finally:
            tasks = [task for task in (following_pool, pods) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    # --- one pod ----------------------------------------------------------------------------------

    def _place(self, pod: _Pod, ports: Sequence[int]) -> _PodPlace | None:
        if not pod.is_ready or pod.status.ip is None:
            return None
        annotation = (pod.metadata.annotations or {}).get(ANNOTATION)
        named = {
            each.name or "": each.container_port
            for container in pod.spec.containers
            for each in container.ports or ()
        }
        found = self._ports(named, ports)
        role = (pod.metadata.labels or {}).get(ROLE_LABEL)
        return _PodPlace(pod.metadata.name, pod.status.ip, found, annotation, role)

    def _places(self, found: _EndpointSlice) -> Iterator[_PodPlace]:
        ports = self._ports({each.name or "": each.port for each in found.ports or () if each.port})
        for endpoint in found.endpoints or ():
            conditions = endpoint.conditions
            # An unknown readiness counts as ready: discovery.k8s.io/v1, EndpointConditions.
            if conditions.ready is not False and not conditions.terminating:
                address = endpoint.addresses[0] if endpoint.addresses else ""
                name = endpoint.target_ref.name if endpoint.target_ref else ""
                yield _PodPlace(name or address.replace(":", "-"), address, ports)

    def _ports(self, named: Mapping[str, int], given: Sequence[int] = ()) -> tuple[int, ...]:
        """The configured port, else those of the pool, else the only one."""
        port = self._config.port
        if isinstance(port, int):
            return (port,)
        if isinstance(port, str):
            return (named[port],) if port in named else ()
        if given:
            return tuple(given)
        distinct = set(named.values())
        return tuple(distinct) if len(distinct) == 1 else ()

    def _report(
        self, places: Iterable[_PodPlace], unreadable: Mapping[str, str], listener: ProviderListener
    ) -> None:
        known, self._made = self._made, {}
        broken = [f"{name}: {why}" for name, why in sorted(unreadable.items())]
        replicas: list[ReplicaConfig] = []
        for place in places:
            made = known.get(place) or self._make(place)
            self._made[place] = made
            if isinstance(made, str):
                broken.append(made)
            else:
                replicas += made
        replicas.sort(key=lambda replica: replica.replica_id)
        listener.on_replicas(replicas, broken)

    def _make(self, place: _PodPlace) -> tuple[ReplicaConfig, ...] | str:
        """The replicas at a place, or the reason why it has none."""
        if place.role is not None and place.role not in _ROLES:
            rule = f"must be one of {', '.join(_ROLES)}"
            return f"pod {place.name}: label {ROLE_LABEL}: {place.role!r}; {rule}"
        if place.role is not None and _ROLES[place.role] is None:
            return ()
        where = f"pod {place.name}: {ANNOTATION}"
        try:
            return tuple(self._replicas_at(place))
        except ValidationError as error:
            return "; ".join(map(str, problems_in(error, _PodOptions, where)))
        except (msgspec.DecodeError, RecursionError) as error:
            return f"{where}: {error}"

    def _replicas_at(self, place: _PodPlace) -> Iterator[ReplicaConfig]:
        """The replicas at a place, one for each port."""
        fields = msgspec.json.decode(place.annotation) if place.annotation else {}
        options = _PodOptions.model_validate(fields)
        own = {name: getattr(options, name) for name in options.model_fields_set}
        ports = (own.pop("port"),) if options.port is not None else place.ports
        scheme = own.pop("scheme", None) or self._config.scheme
        path = own.pop("path", None) or self._config.path or ""
        own.pop("port", None)
        shared = self._config.replica
        given = {name: getattr(shared, name) for name in shared.model_fields_set}
        if place.role is not None:
            given["role"] = _ROLES[place.role]
        given.update(own)
        if not ports:
            raise msgspec.DecodeError("names no port, and the configuration neither")
        for port in ports:
            suffix = f":{port}" if len(ports) > 1 else ""
            yield ReplicaConfig(
                url=f"{scheme}://{in_url(place.address)}:{port}{path}",
                id=f"{self._config.id_prefix}{place.name}{suffix}",
                **given,
            )


class _PoolReports(ProviderListener):
    """Passes on what is reported of a pool's pods, with what is wrong with the pool itself."""

    def __init__(self, listener: ProviderListener) -> None:
        self._listener = listener
        self._problem: str | None = None
        self._last: tuple[Sequence[ReplicaConfig], Sequence[str]] | None = None
        """The last report of the pods; None after a failure."""

    def on_replicas(self, replicas: Sequence[ReplicaConfig], broken: Sequence[str] = ()) -> None:
        self._last = replicas, broken
        own = () if self._problem is None else (self._problem,)
        self._listener.on_replicas(replicas, (*own, *broken))

    def on_failure(self, why: str) -> None:
        self._last = None
        self._listener.on_failure(why)

    def on_pool(self, problem: str | None) -> None:
        """Take why the pool cannot be asked for, or used; None: it can."""
        before, self._problem = self._problem, problem
        if problem is not None:
            self._listener.on_failure(problem)
        elif before is not None and self._last is not None:
            self.on_replicas(*self._last)


def _usable_pool(pools: Collection[_Pool], name: str) -> _Pool | str:
    """The pool, or the reason why its pods cannot be followed."""
    pool = pools.objects.get(name)
    if pool is None:
        return pools.unreadable.get(name, "no pool of this name")
    return pool if pool.label_selector else "its selector has no labels"


def _retry() -> Backoff:
    return Backoff(FIRST_RETRY_S, MAX_RETRY_S)


def _pass_on(task: asyncio.Task[None], ended: asyncio.Future[None]) -> None:
    """Pass the error of a task to *ended*."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not ended.done():
        ended.set_exception(error)


# --- the account ----------------------------------------------------------------------------------


def _connection(
    config: KubernetesDiscovery, environ: Mapping[str, str]
) -> tuple[Origin, Callable[[], str | None], Callable[[], ssl.SSLContext | None]]:
    """The API server, the account's token, and the trusted authorities, as they are now."""
    if config.api_server is not None:
        origin = Origin.parse(config.api_server)
    else:
        host, port = (environ.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))
        if not host or not port:
            raise KubernetesError("not inside a cluster, and no api_server is configured")
        origin = Origin.parse(f"https://{in_url(host)}:{port}")
    token_file = Path(config.token_file) if config.token_file else ACCOUNT / "token"
    ca_file = Path(config.ca_file) if config.ca_file else ACCOUNT / "ca.crt"
    try:
        authorities = _Authorities(ca_file)
    except (OSError, ssl.SSLError) as error:
        raise KubernetesError(f"ca_file {ca_file}: {error}") from None
    return origin, lambda: _token(token_file), authorities.trusted


class _Authorities:
    """The certificates in a file; read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = stamp_of(path)
        self._context = None if self._stamp is None else self._read()

    def trusted(self) -> ssl.SSLContext | None:
        """Return those of the file; where it is half written or gone, those before."""
        stamp = stamp_of(self._path)
        if stamp not in (None, self._stamp):
            with contextlib.suppress(OSError, ssl.SSLError):
                self._context, self._stamp = self._read(), stamp
        return self._context

    def _read(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=os.fspath(self._path))


def _token(path: Path) -> str | None:
    try:
        return path.read_text("ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _own_namespace() -> str:
    try:
        return (ACCOUNT / "namespace").read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        raise KubernetesError("not inside a cluster, and no namespace is configured") from None
