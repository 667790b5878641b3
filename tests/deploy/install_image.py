"""Runs the Dockerfile's own install line on the files that it copies, in a fresh environment: the
router's image without a builder.

It takes a minute and needs a package index, so it is not part of the tests: `python -m
tests.deploy.install_image`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.deploy.dockerfile import copy_sources, stages
from tests.deploy.files import DEPLOY, succeeds

FORBIDDEN = {"torch", "numpy"}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvroute-image-") as directory:
        environment = Path(directory) / "environment"
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        copy_sources(Path(directory) / "source")
        install(environment, Path(directory) / "source")
        config = str(DEPLOY / "compose/kvroute.yaml")
        print(
            succeeds(
                str(environment / "bin/kvroute"),
                "serve",
                "--config",
                config,
                "--check",
                cwd=Path(directory),
            ),
            end="",
        )


def install(environment: Path, source: Path) -> None:
    """Install as the stage `build` does; torch must not be among the dependencies."""
    pip = str(environment / "bin/pip")
    for line in stages(DEPLOY / "Dockerfile")["build"].all_of("RUN"):
        words = line.partition("/opt/kvroute/bin/pip ")[2].split()
        if words:
            subprocess.run([pip, *words], cwd=source, check=True)
    listed = (
        succeeds(pip, "list", "--format=freeze", "--disable-pip-version-check").lower().splitlines()
    )
    found = FORBIDDEN & {each.partition("==")[0] for each in listed}
    if found:
        sys.exit(f"the router's image would hold {', '.join(sorted(found))}")


if __name__ == "__main__":
    main()
