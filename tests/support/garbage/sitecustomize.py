"""Makes a Python process tell what it leaves for the garbage collector.

On the path of a process and with `KVROUTE_GARBAGE` set to a file, nothing is collected by itself.
On SIGUSR2 everything is, and how many objects of each of our types were in circles is written
there as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import signal
from collections import Counter
from pathlib import Path

_OURS = ("router.", "kvevents.", "offload.", "uvicorn.", "httptools.")


def _tell(*_: object) -> None:
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = Counter(
        f"{type(each).__module__}.{type(each).__qualname__}"
        for each in gc.garbage
        if type(each).__module__.startswith(_OURS)
    )
    gc.garbage.clear()
    path = Path(os.environ["KVROUTE_GARBAGE"])
    written = path.with_suffix(".new")
    written.write_text(json.dumps(found))
    written.replace(path)


if "KVROUTE_GARBAGE" in os.environ:
    gc.disable()
    signal.signal(signal.SIGUSR2, _tell)
