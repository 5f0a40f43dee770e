# Everything runs in .venv, installed from the pins of constraints.txt. Needs Python 3.11 or later and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# PIP_FLAGS adds options to every installation, e.g. --extra-index-url with PyTorch's own index of CPU builds.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --constraint constraints.txt
# Options for pytest: make test ARGS="-k lossless"
ARGS ?=
WORKERS ?= 2
# For the tests of the Triton forms where torch is a CPU build: a CUDA build brings the one release that it works with.
TRITON := triton==3.6.0

.DEFAULT_GOAL := help
.PHONY: help demo test check format stubs clean

help:  ## What can be made
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 14

demo: $(VENV)/.demo  ## Fetch a small model, serve it with its draft on this machine, and ask it a question
	$(BIN)/python deploy/demo/demo.py

test: $(VENV)/.test  ## Run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

check: $(VENV)/.test $(VENV)/stubs/.installed  ## Lint, types, layers, the wire contract and its stubs, the image
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint
	$(BIN)/hadolint deploy/Dockerfile
	PYTHON=$(VENV)/stubs/bin/python tools/generate_stubs.sh --check

format: $(VENV)/.test  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stubs: $(VENV)/stubs/.installed  ## Generate outrider/v1 from proto/
	PYTHON=$(VENV)/stubs/bin/python tools/generate_stubs.sh

clean:  ## Remove the environment and all caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or later is needed, found " + sys.version)'
	$(PYTHON) -m venv $(VENV)

# One stamp for each extra of pyproject.toml.
$(VENV)/.demo $(VENV)/.test: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV): a few minutes"
	@$(INSTALL) setuptools
	@$(INSTALL) --no-build-isolation --editable '.[$*]'
	@$(if $(filter test,$*),$(INSTALL) --no-deps speculators)
	@$(if $(filter test,$*),$(BIN)/python -c 'import triton' 2>/dev/null || [ "$$(uname)" != Linux ] || $(INSTALL) '$(TRITON)')
	@touch $@

# The generator stays at the floor of what its output must load on, so it has an environment of its own.
$(VENV)/stubs/.installed: tools/stubs-requirements.txt | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/stubs
	@$(VENV)/stubs/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@
