"""A minimal Dockerfile reader to check ours: its stages, their instructions, what they copy from
the repository."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.files import DEPLOY, ROOT


@dataclass
class Stage:
    """One FROM and everything up to the next."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all_of(self, word: str) -> list[str]:
        """The arguments of every such instruction."""
        return [arguments for found, arguments in self.instructions if found == word]


def stages(path: Path) -> dict[str, Stage]:
    """The stages by name, in order."""
    found: dict[str, Stage] = {}
    stage = Stage("", "")
    for word, arguments in instructions(path.read_text()):
        if word == "FROM":
            base, _, name = arguments.partition(" AS ")
            stage = found[name] = Stage(name, base)
        else:
            stage.instructions.append((word, arguments))
    return found


def instructions(text: str) -> list[tuple[str, str]]:
    """Keyword and arguments, with continued lines joined."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (line.split(" ", 1)[0], line.split(" ", 1)[1])
        for line in joined.splitlines()
        if line.strip()
    ]


def lineage(found: dict[str, Stage], name: str) -> list[Stage]:
    """A stage and those it is built on, nearest first."""
    stage = found[name]
    return [stage, *(lineage(found, stage.base) if stage.base in found else [])]


def copied() -> list[str]:
    """What our images copy from the repository."""
    copies = [
        line.split()
        for stage in stages(DEPLOY / "Dockerfile").values()
        for line in stage.all_of("COPY")
    ]
    return [
        source for words in copies if not words[0].startswith("--from=") for source in words[:-1]
    ]


def copy_sources(target: Path) -> None:
    """Copy what the COPY lines copy."""
    target.mkdir()
    for source in copied():
        if (ROOT / source).is_dir():
            shutil.copytree(
                ROOT / source, target / source, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / source, target / Path(source).name)
