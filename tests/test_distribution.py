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

from tests.support.native import what_the_compiled_index_lacks

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
        [sys.executable, "-m", "build", *arguments], capture_output=True, text=True, check=False
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
    """Where there is no compiler it is the one file that is missing."""
    compiled = [name for name in wheel_files if name.endswith(".so")]
    assert not any(name.startswith("router/core") for name in wheel_files)
    if missing := what_the_compiled_index_lacks():
        pytest.skip(missing)
    assert len(compiled) == 1
    assert compiled[0].startswith("router/_core.")


def test_without_a_compiler_the_wheel_is_pure(tmp_path: Path) -> None:
    """A machine without g++ must still be able to install the router, and be told what it lacks."""
    copy_source(tmp_path / "source")
    arguments = ["--no-isolation", "--wheel", "--outdir", str(tmp_path), str(tmp_path / "source")]
    done = subprocess.run(
        [sys.executable, "-m", "build", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CXX": "/nonexistent/c++"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "built WITHOUT its compiled index" in done.stdout
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not any(name.endswith(".so") for name in archive.namelist())
