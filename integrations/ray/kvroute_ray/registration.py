"""A replica has itself listed at the router for as long as it lives.

In the constructor of a deployment, when its engine serves:

```python
self._registration = register("http://router:8000", url="http://10.0.0.7:8000")
```
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
from ray import serve

from kvroute_ray.names import deployment_prefix, replica_name
from kvroute_ray.options import check_url, key_of

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("ray.serve")

EVERY_S = 5.0
"""The time between two looks of a replica whether it is listed: a router that was started anew
knows none."""
GONE_AFTER_S = 60.0
"""A replica of its deployment that has been unhealthy for so long is removed."""
TIMEOUT_S = 5.0
_PORTS = {"http": 80, "https": 443}


def register(
    routers: str | Sequence[str], url: str, operator_key_env: str | None = None, **fields: Any
) -> Registration:
    """List the replica in whose process this is called, by Ray's name for it.

    Args:
        routers: URLs of all routers that serve its deployment.
        url: Where its engine serves HTTP, as the routers reach it; at least `GET /health`
            (`kvroute_ray.health.HealthPort`).
        operator_key_env: The environment variable with the routers' operator key, where they have
            one.
        fields: What else `POST /replicas` takes: `models`, `kv_events` ...
    Raises:
        ValueError: A URL, or the key, is none.
    """
    context = serve.get_replica_context()
    return Registration(
        [routers] if isinstance(routers, str) else routers,
        {**fields, "url": url, "id": replica_name(context.replica_id)},
        deployment_prefix(context.replica_id.deployment_id),
        key_of(operator_key_env),
    )


class Registration:
    """One replica's place in the routers' lists, kept by a thread.

    The first attempt is made at once. A router that cannot be reached, or refuses, is tried again
    for ever: the replica serves in any case, chosen by Ray.

    Args:
        routers: Their URLs.
        config: The body of `POST /replicas`, with `id` and `url`.
        prefix: Of the names of all replicas of the deployment. One that bears it is removed where
            it has this replica's URL, or has been unhealthy for *gone_after_s*: if it lives, it
            lists itself anew.
        operator_key: Of the routers.
        every_s: How often it looks.
    """

    def __init__(
        self,
        routers: Sequence[str],
        config: Mapping[str, Any],
        prefix: str,
        operator_key: str | None = None,
        every_s: float = EVERY_S,
        gone_after_s: float = GONE_AFTER_S,
    ) -> None:
        for router in routers:
            check_url("routers", router)
        check_url("url", config["url"])
        headers = {} if operator_key is None else {"authorization": f"Bearer {operator_key}"}
        self.name = str(config["id"])
        """Its id at the routers."""
        self.looks = 0
        """The looks since."""
        self._config = dict(config)
        self._every_s = every_s
        self._gone_after_s = gone_after_s
        self._ended = threading.Event()
        self._lists = [_ListAt(router, self._config, prefix, headers) for router in routers]
        for each in self._lists:
            each.look()
        self._thread = threading.Thread(target=self._keep, name="kvroute", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Have it removed: nothing more is sent to it. A second call changes nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        atexit.unregister(self.close)
        self._thread.join()
        for each in self._lists:
            each.leave()

    def _keep(self) -> None:
        looks_a_sweep = max(1, round(self._gone_after_s / self._every_s))
        while not self._ended.wait(self._every_s):
            self.looks += 1
            for each in self._lists:
                each.look()
                if self.looks % looks_a_sweep == 0:
                    each.sweep(self._gone_after_s)


class _ListAt:
    """The list of one router. Nothing here raises what a router can cause."""

    def __init__(
        self, router: str, config: Mapping[str, Any], prefix: str, headers: Mapping[str, str]
    ) -> None:
        self._router = router
        self._config = config
        self._prefix = prefix
        self._http = httpx.Client(base_url=router, headers=dict(headers), timeout=TIMEOUT_S)
        self._problem = ""

    def look(self) -> None:
        """Enter it where it is missing."""
        try:
            found = self._http.get(f"/replicas/{self._config['id']}")
            if found.status_code == 404:
                found = self._enter()
            self._note("" if found.is_success else _message(found))
        except httpx.HTTPError as error:
            self._note(f"does not answer ({type(error).__name__})")

    def _enter(self) -> httpx.Response:
        found = self._http.post("/replicas", json=self._config)
        if found.status_code == 409:
            # An earlier replica at this address, which did not live to leave.
            own = _address(self._config["url"])
            for each in self._of_the_deployment():
                if _address(str(each.get("url"))) == own:
                    self._http.delete(f"/replicas/{each['id']}")
            found = self._http.post("/replicas", json=self._config)
        return found

    def sweep(self, gone_after_s: float) -> None:
        """Remove what has been unhealthy for long."""
        # Whatever answers there may not be a router.
        with contextlib.suppress(httpx.HTTPError, ValueError, TypeError, LookupError):
            for each in self._of_the_deployment():
                is_gone = each.get("health") == "unhealthy"
                if is_gone and float(each.get("seconds_in_health", 0)) >= gone_after_s:
                    self._http.delete(f"/replicas/{each['id']}")

    def leave(self) -> None:
        """Remove it."""
        try:
            self._http.delete(f"/replicas/{self._config['id']}")
        except httpx.HTTPError as error:
            self._note(f"does not answer ({type(error).__name__})")
        self._http.close()

    def _of_the_deployment(self) -> list[Mapping[str, Any]]:
        """Return the other replicas of it."""
        found = self._http.get("/replicas")
        try:
            every = found.json()["replicas"] if found.is_success else []
            others = [each for each in every if str(each["id"]).startswith(self._prefix)]
        except (ValueError, LookupError, TypeError):
            return []
        return [each for each in others if each["id"] != self._config["id"]]

    def _note(self, problem: str) -> None:
        """Log what is new."""
        if problem and problem != self._problem:
            logger.warning("%s is not listed at %s: %s", self._config["id"], self._router, problem)
        elif self._problem and not problem:
            logger.info("%s is listed at %s again", self._config["id"], self._router)
        self._problem = problem


def _address(url: str) -> tuple[str, str | None, int | None] | None:
    """Return what two URLs of one server have in common: the router has a form of its own."""
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"it answered {response.status_code}"
