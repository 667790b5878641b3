"""One option chooses the index, and whoever asks for the compiled one is told why there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.cli.main import EXIT_USAGE, main
from router.config import RouterConfig
from router.index import (
    REFERENCE,
    IndexImplementation,
    IndexUnavailable,
    choice,
    choose_index,
    create_index,
    why_not_native,
)
from router.index.reference.index import ReferenceIndex
from router.service import RouterService


@pytest.fixture
def _without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it was not built."""
    monkeypatch.setitem(sys.modules, "router.index.native", None)


def native() -> IndexImplementation:
    found = choose_index("auto")
    if found is REFERENCE:
        pytest.skip("the compiled index is not built")
    return found


def test_the_compiled_index_serves_where_it_was_built() -> None:
    """Nobody should have to ask for it."""
    assert native().name == choose_index("native").name == "native"
    assert isinstance(create_index(), type(native().create()))


def test_the_reference_can_be_asked_for() -> None:
    """Whoever suspects the compiled index must be able to compare."""
    assert choose_index("reference") is REFERENCE
    assert isinstance(REFERENCE.create(), ReferenceIndex)


@pytest.mark.usefixtures("_without_native")
def test_without_a_compiled_index_the_reference_serves() -> None:
    """`pip install` works without a compiler, so the router must, too."""
    assert choose_index() is REFERENCE
    assert isinstance(create_index(), ReferenceIndex)


def test_a_compiled_index_of_another_version_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever updates the sources and builds nothing has an old module beside them: what it takes
    and returns has changed since."""
    old = ModuleType("router._core")
    vars(old).update(core_version=choice.CORE_VERSION - 1, __file__="_core.so")
    monkeypatch.setitem(sys.modules, old.__name__, old)
    assert choose_index() is REFERENCE
    said = why_not_native()
    assert said is not None
    assert said.startswith(f"_core.so is a compiled index of version {old.core_version}: it must")
    with pytest.raises(IndexUnavailable, match="build it again"):
        choose_index("native")


def test_the_version_that_is_asked_for_is_that_of_the_sources() -> None:
    """Else a fresh build would be left alone, too."""
    binding = Path(choice.__file__).parents[1] / "core" / "binding" / "module.cpp"
    assert f'module.attr("core_version") = {choice.CORE_VERSION};' in binding.read_text()


@pytest.mark.usefixtures("_without_native")
@pytest.mark.parametrize("check", [(), ("--check",)], ids=["serve", "check"])
@pytest.mark.parametrize("by", ["option", "file"])
def test_asking_for_a_compiled_index_that_is_not_there_is_a_configuration_error(
    by: str, check: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be several times slower than what was planned with, unnoticed."""
    path = tmp_path / "kvroute.yaml"
    path.write_text("index: native" if by == "file" else "")
    option = ("--index", "native") if by == "option" else ()
    assert main(["serve", "--config", str(path), *option, *check]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "1 problem in the configuration:\n  index: 'native'; " in said
    assert "C++20 compiler" in said


def test_the_command_line_overrides_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To compare, nobody should have to edit a file."""
    monkeypatch.setitem(sys.modules, "router.index.native", None)
    path = tmp_path / "kvroute.yaml"
    path.write_text("index: native")
    assert main(["serve", "--config", str(path), "--index", "reference", "--check"]) == 0
    assert "the configuration is sound" in capsys.readouterr().out


async def test_metrics_name_the_implementation() -> None:
    """A fleet where one router was installed without a compiler shows it in one query."""
    service = RouterService(RouterConfig(index="reference"))
    async with service.lifespan(None):
        text = (await service.render_metrics()).decode()
    (found,) = (
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "kvroute_index_info"
    )
    assert (found.labels, found.value) == ({"implementation": "reference"}, 1)
