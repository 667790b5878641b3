"""The sdist and the wheel contain what those who download them need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.native import QUICK_BUILD

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvevents", "offload", "router")
NOT_SOURCE = shutil.ignore_patterns(
    ".*_cache", ".hypothesis", ".venv*", "*.so", "__pycache__", "build", "dist"
)


def tracked_files() -> list[str]:
    """The files under version control, or none outside of a checkout."""
    if not (ROOT / ".git").exists():
        return []
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    return [name for name in listed.split("\0") if (ROOT / name).is_file()]


def copy_source(to: Path) -> None:
    """Copy what a fresh checkout has, without anything that was built in it."""
    tracked = tracked_files()
    if not tracked:
        shutil.copytree(ROOT, to, ignore=NOT_SOURCE)
    for name in tracked:
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel that was built from it."""
    directory = tmp_path_factory.mktemp("distribution")
    copy_source(directory / "source")
    arguments = ["--no-isolation", "--outdir", str(directory), str(directory / "source")]
    done = subprocess.run(
        [sys.executable, "-m", "build", *arguments],
        env={**os.environ, **QUICK_BUILD},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return directory


@pytest.fixture(scope="module")
def sdist_files(built: Path) -> set[str]:
    """The names of the files in the sdist, without its top directory."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


@pytest.fixture(scope="module")
def wheel_files(built: Path) -> set[str]:
    """The names of the files in the wheel."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        return set(archive.namelist())


def test_the_license_is_in_both(sdist_files: set[str], wheel_files: set[str]) -> None:
    """Apache-2.0 asks for a copy of it in every distribution."""
    assert "LICENSE" in sdist_files
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_files)


def test_the_sdist_has_every_tracked_file(sdist_files: set[str]) -> None:
    """So its tests run, with their recordings, documents and manifests."""
    assert {"tests/conftest.py", "tests/test_documents.py", "pyproject.toml"} <= sdist_files
    assert set(tracked_files()) - sdist_files == set()


def test_the_wheel_has_every_module_and_nothing_else(
    sdist_files: set[str], wheel_files: set[str]
) -> None:
    """A forgotten package shows only where it was installed from the wheel."""
    modules = {name for name in sdist_files if name.endswith(".py")}
    expected = {name for name in modules if name.split("/")[0] in PACKAGES}
    assert {name for name in wheel_files if name.endswith(".py")} == expected


def test_the_wheel_has_the_live_page_and_the_types(
    sdist_files: set[str], wheel_files: set[str]
) -> None:
    """The live page is read from the package at run time, and type checkers look for `py.typed`."""
    static = {name for name in sdist_files if name.startswith("router/static/")}
    assert static
    types = {f"{package}/py.typed" for package in PACKAGES} | {"router/_core.pyi"}
    assert static | types <= wheel_files


def test_the_wheel_has_the_compiled_index_and_not_its_sources(wheel_files: set[str]) -> None:
    """Without a compiler as well: PyPI has one."""
    compiled = [name for name in wheel_files if name.endswith(".so")]
    assert not any(name.startswith("router/core") for name in wheel_files)
    assert len(compiled) == 1
    assert compiled[0].startswith("router/_core.")


def _required(tmp_path: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the build backend says where the system has no compiler."""
    (tmp_path / "empty").mkdir()
    without = {name: value for name, value in os.environ.items() if name != "CXX"}
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT / "packaging",
        env={**without, "PATH": str(tmp_path / "empty"), **environment},
    )


_ASK = "import kvroute_build as backend; print(backend._more([]))"


def test_without_a_compiler_one_is_fetched_from_pypi(tmp_path: Path) -> None:
    """`pip install .` needs nothing by hand."""
    assert "ziglang" in _required(tmp_path, _ASK).stdout


def test_what_pypis_compiler_makes_runs_on_other_processors(tmp_path: Path) -> None:
    """By itself it compiles for the one that it runs on: an image that was built on a newer machine
    ended with an illegal instruction."""
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    (tmp_path / "ziglang" / "__main__.py").write_text("import sys\nprint(*sys.argv[1:])\n")
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    script = ROOT / "router" / "core" / "compiler.cmake"
    options = ("-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF", f"-DPython_EXECUTABLE={sys.executable}")
    cmake = Path(sys.executable).with_name("cmake")
    subprocess.run([cmake, *options, "-P", script], check=True, cwd=tmp_path, env=environment)
    compiler = tmp_path / "zig" / "c++"
    said = subprocess.check_output([compiler, "a.cpp"], text=True, env=environment)
    assert said == "c++ -mcpu=baseline a.cpp\n"


def test_a_compiler_that_is_named_is_used(tmp_path: Path) -> None:
    """Nobody who has one should load 90 MB."""
    assert "ziglang" not in _required(tmp_path, _ASK, CXX="c++").stdout


def test_without_pythons_headers_one_line_says_so(tmp_path: Path) -> None:
    """Nothing on PyPI has them, and CMake's own words would fill a page."""
    hidden = "import sysconfig; sysconfig.get_path = lambda _name: '/nonexistent'; "
    done = _required(tmp_path, hidden + _ASK)
    assert done.returncode == 1
    assert done.stderr.startswith("kvroute: /nonexistent/Python.h is missing; ")
    assert done.stderr.endswith("(Debian: python3-dev)\n")
    assert done.stderr.count("\n") == 1
