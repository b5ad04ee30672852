# make demo: set up and run the main job.   make test: set up, check and test.   Everything stays inside this folder, most of it in .venv.
# Another Python (3.11 or newer): make PYTHON=python3.12 setup.   torch without CUDA, a tenth of the size, from an index that has it:
# make TORCH_INDEX=<address of the index> setup.   Tests in more than two processes: make WORKERS=8 test

PYTHON ?= python3
VENV := .venv
HERE := $(CURDIR)/$(VENV)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-cache-dir --quiet
RANKS ?= 4
WORKERS ?= 2
FOLDERS := $(VENV)/tmp $(VENV)/cache $(VENV)/config/matplotlib

# Caches and temporary files are inside .venv, so that nothing is written elsewhere.
export TMPDIR := $(HERE)/tmp
export XDG_CACHE_HOME := $(HERE)/cache
export XDG_CONFIG_HOME := $(HERE)/config
export MPLCONFIGDIR := $(HERE)/config/matplotlib
export OMP_NUM_THREADS := 1

.PHONY: help setup test gpu hub lint format demo clean

help:
	@echo "make demo    set up and run the main job: examples/train_gpt.py on $(RANKS) processes"
	@echo "make test    set up, then all checks and tests"
	@echo "make gpu     set up, then the tests of what ranks compute with all ranks on the GPUs of this machine"
	@echo "make hub     set up with the package transformers, then the tests with its models"
	@echo "make lint    ruff, mypy, import-linter      make format  ruff format and fixes"
	@echo "make setup   only install into .venv        make clean   remove .venv and caches"

setup: $(STAMP)

# torch on its own first: it is by far the largest, and another index may be named for this step alone.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "hapx needs Python 3.11 or newer as '$(PYTHON)'; found: $$($(PYTHON) --version 2>/dev/null || echo none). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "Python's venv module is missing. On Debian and Ubuntu: apt install python3-venv; then again: make $(MAKECMDGOALS)" >&2; exit 1; }
	@mkdir -p $(FOLDERS)
	@test -x $(BIN)/python || { echo "creating .venv"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch (large; a few minutes)"
	@$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --constraint constraints.txt torch==2.13.0
	@echo "installing hapx and its tools"
	@$(PIP) install --constraint constraints.txt --editable '.[test,demo]'
	@touch $(STAMP)
	@echo "ready: .venv"

test: setup lint
	@mkdir -p $(FOLDERS)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --basetemp=$(VENV)/tmp/pytest

# What ranks compute, on GPUs: they share them where there are too few. (The torch of the constraints file comes with CUDA where the index has it.)
gpu: setup
	@mkdir -p $(FOLDERS)
	HAPX_TEST_DEVICE=cuda $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -W default --basetemp=$(VENV)/tmp/pytest -m "not slow" \
	  tests/equivalence tests/collectives/test_dropout.py

# Models of the package transformers, without downloads: made from configurations, with random weights.
HUB_STAMP := $(VENV)/.installed-hub
$(HUB_STAMP): $(STAMP)
	@echo "installing the extra hub"
	@$(PIP) install --constraint constraints.txt --editable '.[test,demo,hub]'
	@touch $(HUB_STAMP)

hub: $(HUB_STAMP)
	@mkdir -p $(FOLDERS)
	$(BIN)/python -m pytest tests/hub -q --basetemp=$(VENV)/tmp/pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The launcher's own warnings are silenced, not the program's: errors of a rank are still shown.
demo: setup
	@mkdir -p $(FOLDERS)
	@LOGLEVEL=ERROR TORCH_CPP_LOG_LEVEL=ERROR $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/train_gpt.py

clean:
	rm -rf $(VENV) build *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find hapx tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
