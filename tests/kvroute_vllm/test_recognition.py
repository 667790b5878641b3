"""What is not recognised is not touched."""

from __future__ import annotations

import pytest

from kvroute_vllm.recognition import UnknownVllm, check_parameters, check_version


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.29.0", (0, 29)), ("0.32.0+cpu", (0, 32)), ("0.33.1rc2", (0, 33))],
)
def test_a_known_release_is_known_in_every_build(version: str, release: tuple[int, int]) -> None:
    """Builds for CPUs and patches carry suffixes."""
    assert check_version(version) == release


@pytest.mark.parametrize("version", ["0.28.1", "0.34.0", "1.0", "dev", "", "x" * 1000])
def test_any_other_version_is_refused_with_those_known(version: str) -> None:
    """A cache manager of another version may mean something else by the same name."""
    with pytest.raises(UnknownVllm, match=r"known are 0\.29 to 0\.33$"):
        check_version(version)


def test_a_method_with_other_parameters_is_refused_by_its_name() -> None:
    """Whoever reads the log should know what to look at."""

    def cache_blocks(self: object, request: object) -> None: ...

    assert check_parameters(cache_blocks, "self request", "self") == "self request"
    with pytest.raises(UnknownVllm, match=r"cache_blocks\(self, request\)"):
        check_parameters(cache_blocks, "self request num_tokens")
