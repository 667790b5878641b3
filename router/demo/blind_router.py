"""`kvroute serve` with a group-blind index: the process that the demo compares with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from router.config import RouterConfig
from router.demo.blind import GroupBlindIndex
from router.serve import run

if __name__ == "__main__":
    sys.exit(run(RouterConfig.load(Path(sys.argv[1]), os.environ), make_index=GroupBlindIndex))
