"""These tests need vLLM, which `make interop` installs in an environment of its own; without it
they are not collected."""

from __future__ import annotations

import importlib.util
import os
import warnings

collect_ignore_glob: list[str] = []

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*.py"]
else:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    # Warnings are errors here as everywhere, except those that vLLM and its packages raise during
    # import.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("tests.interop.vllm_cache")
