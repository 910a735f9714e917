# The commands of the project; `make` lists them. Everything runs in .venv, which is made on first use.

PYTHON ?= python3
MODEL ?=
# What the protocol must stay compatible with.
PROTO_BASE ?= HEAD

# A process a core, whole files each: fixtures are shared within a file.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# In an environment of its own: it pins old versions of packages that others need.
CHECKOV := .cache/checkov/bin/checkov

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-full check scan bench protos clean

help:  ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED)  ## Serve the small Gemma 4, stream a generation, compare draft methods (MODEL=smollm2, ARGS="--speculator ...")
	@$(BIN)/python -m tools.demo --model '$(or $(MODEL),tiny-gemma4)' $(ARGS)

serve: $(INSTALLED)  ## Serve a model in the foreground (MODEL=..., ARGS="--port 50051 ...")
	@model=$$($(BIN)/python -m tools.fetch_model '$(or $(MODEL),smollm2)') && exec $(BIN)/slipstream serve --model "$$model" $(ARGS)

test: $(INSTALLED)  ## Run the tests, without the long form of the matrices
	$(BIN)/pytest -q -m 'not full' $(PARALLEL)

test-full: $(INSTALLED)  ## Run every test
	$(BIN)/pytest -q $(PARALLEL)

check: $(INSTALLED)  ## Formatting, lint, types, import order, protocol, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tools benchmarks
	$(BIN)/lint-imports
	$(BIN)/buf lint
	@! git cat-file -e '$(PROTO_BASE):protos' 2>/dev/null || $(BIN)/buf breaking --against '.git#ref=$(PROTO_BASE)'
	$(BIN)/python -m tools.protos --check

scan: $(INSTALLED) $(CHECKOV)  ## Scan the rendered chart and the Dockerfile for insecure settings (checkov)
	rm -rf build/manifests
	$(BIN)/python -m tools.render_chart build/manifests
	cp deploy/envoy/kubernetes.yaml build/manifests/envoy.yaml
	$(CHECKOV) --config-file deploy/checkov.yaml --framework kubernetes --directory build/manifests
	$(CHECKOV) --config-file deploy/checkov.yaml --framework dockerfile --file Dockerfile

bench: $(INSTALLED)  ## Run the quick form of every benchmark, write benchmarks/results/*.json
	$(BIN)/python -m benchmarks --quick

protos: $(INSTALLED)  ## Generate server/pb from protos/
	$(BIN)/python -m tools.protos

clean:  ## Remove .venv, caches and build output (not fetched models)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Slipstream needs Python 3.11 or later; got $$($(PYTHON) --version 2>&1). Set PYTHON=/path/to/python3." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "Python's venv module is missing or incomplete (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[dev]'
	@touch $@

$(CHECKOV):
	$(PYTHON) -m venv .cache/checkov
	.cache/checkov/bin/pip install --disable-pip-version-check --quiet 'checkov>=3.2,<4'
