"""A file with a list of replicas is followed as operators and programs write it."""

from __future__ import annotations

import json
from pathlib import Path

from router.config.discovery import FileDiscovery
from router.fleet.discovery.file import FileProvider
from tests.router.fleet.discovery.found import following
from tests.support.waiting import eventually


def provider(path: Path, **environ: str) -> FileProvider:
    return FileProvider(FileDiscovery(path=str(path), interval_s=0.01), environ)


async def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """Both forms of a list, YAML and JSON, with keys from the environment."""
    path = tmp_path / "replicas.yaml"
    path.write_text("replicas: [{url: 'http://a:1', api_key: '${KEY}', speed: 2}]")
    async with following(provider(path, KEY="secret")) as found:
        await eventually(lambda: list(found.urls) == ["a:1"], "the first list")
        key = found.replicas["a:1"].api_key
        assert key is not None
        assert key.get_secret_value() == "secret"
        path.write_text(json.dumps([{"url": "http://b:1"}, {"url": "http://c:1", "id": "c"}]))
        await eventually(lambda: sorted(found.urls) == ["b:1", "c"], "the second")
        path.write_text("")
        await eventually(lambda: found.urls == {}, "an empty list is a list")


async def test_a_file_that_breaks_a_rule_is_refused_as_a_whole(tmp_path: Path) -> None:
    """Half a list would drain the other half."""
    path = tmp_path / "replicas.yaml"
    path.write_text("[{url: 'http://a:1'}, {url: 'http://b:1'}]")
    async with following(provider(path)) as found:
        await eventually(lambda: len(found.urls) == 2, "the list")
        path.write_text("[{url: 'http://a:1'}, {url: 'http://b:1', sped: 1}, {url: 'http://a:1'}]")
        await eventually(lambda: found.failures, "refused")
        assert "replicas[1].sped: unknown key; did you mean speed?" in found.failures[0]
        assert len(found.urls) == 2
        path.write_text("[{url: 'http://a:1'}, {url: 'http://c:1', id: 'a:1'}]")
        await eventually(lambda: len(found.failures) > 1, "refused again")
        assert "replicas[1].id: 'a:1'; replicas[0] has it already" in found.failures[1]


async def test_a_file_that_is_away_for_a_moment_changes_nothing(tmp_path: Path) -> None:
    """Programs that write by renaming, and mounted ConfigMaps, which are links that move."""
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("[{url: 'http://a:1'}]")
    second.write_text("[{url: 'http://b:1'}]")
    path = tmp_path / "replicas.yaml"
    path.symlink_to(first)
    async with following(provider(path)) as found:
        await eventually(lambda: list(found.urls) == ["a:1"], "the list")
        path.unlink()
        await eventually(lambda: found.failures, "it is away")
        assert "cannot be read: No such file or directory" in found.failures[0]
        assert list(found.urls) == ["a:1"]
        path.symlink_to(second)
        await eventually(lambda: list(found.urls) == ["b:1"], "another file")
