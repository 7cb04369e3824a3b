# weftpub: `make demo` and `make test` set up everything they need on a machine with Python 3.12, make and a package index.
# NO_INSTALL=1 runs in the environment as it is (PYTHON=python3 unless named), for machines without a network.

VENV := .venv
PACKAGES := kernels/weftpub_kernels weftpub adapters/weftpub_adapters examples/weftpub_demo examples/weftmoe
DEMO_ARGS ?=
PYTEST_ARGS ?=
TESTS ?= tests
WORKERS ?= 2

SOURCE_PATH := $(CURDIR):$(CURDIR)/kernels:$(CURDIR)/adapters:$(CURDIR)/examples

ifdef NO_INSTALL
PYTHON ?= python3
PY := PYTHONPATH="$(SOURCE_PATH)$(if $(PYTHONPATH),:$(PYTHONPATH))" $(PYTHON)
RUN_READY :=
DEV_READY :=
else
PY := $(VENV)/bin/python
RUN_READY := $(VENV)/.run-ready
DEV_READY := $(VENV)/.dev-ready
endif

# One thread per process: the tests run as WORKERS processes, and the demo's three processes share the machine.
TEST_THREADS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help demo test lint style types layers wheel wheel-check environments requirements clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

demo: $(RUN_READY) ## the main job on this machine (DEMO_ARGS="--optimizer adamw --steps 8" ...)
	@$(PY) -m weftpub_demo $(DEMO_ARGS)

test: $(DEV_READY) ## every test (TESTS=tests/weftpub PYTEST_ARGS="-k plan" for some)
	$(TEST_THREADS) $(PY) -m pytest $(shell $(PY) -c 'import xdist' 2>/dev/null && echo "-n $(WORKERS) --dist loadfile --no-loadscope-reorder") $(PYTEST_ARGS) $(TESTS)

lint: style types layers ## style, types and import layers

style: $(DEV_READY) ## ruff check and format, codespell
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m codespell_lib

types: $(DEV_READY) ## pyright on the core
	$(PY) -m pyright --pythonpath $(firstword $(filter %/bin/python,$(PY)) $(PYTHON))

layers: $(DEV_READY) ## imports go down only
	$(PY) -c 'import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())' --no-cache

wheel: $(DEV_READY) ## build dist/weftpub-*.whl
	rm -rf dist
	$(PY) -m build --wheel --no-isolation --outdir dist .

wheel-check: wheel ## install the wheel in a fresh environment and import every package from it
	requirements/check_wheel.sh $(PY) dist/weftpub-*.whl

environments: ## a trainer's and an engine's environment with different torch builds, for tests/adapters/test_two_environments.py
	tests/environments/install.sh

requirements: $(DEV_READY) ## compile requirements/*.in to *.txt again
	cd requirements && for name in run dev; do \
	  ../$(VENV)/bin/uv pip compile --quiet --override overrides.txt --python-version 3.12 --no-emit-index-url --no-annotate \
	    --custom-compile-command "make requirements" --output-file $$name.txt $$name.in || exit 1; done

clean: ## remove build, report and cache files (the environment stays)
	rm -rf build dist demo-out report.json report.png .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.run-ready: requirements/run.txt requirements/install.sh pyproject.toml
	requirements/install.sh $(VENV) run
	@touch $@

$(VENV)/.dev-ready: requirements/dev.txt $(VENV)/.run-ready
	requirements/install.sh $(VENV) run dev
	@touch $@
