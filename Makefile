# `make train` and `make test` need Python 3.11 or newer with venv, git and make: they set up the rest in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help train test test-all has-newest test-newest test-faults test-layouts docs check format clean

help:
	@echo "make train      set up and train the default model; ARGS='--steps 50' adds options"
	@echo "make test       set up and run the tests: 6 minutes on 2 cores"
	@echo "make test-all   what make test leaves out: long tests, and those that need the extras aot, parity and megatron"
	@echo "make test-newest  the contracts on the newest jax, where there is a Python 3.12 or newer; NEWEST=/path/to/python names it"
	@echo "make test-faults  plants faults in a copy, one at a time, and shows that a test notices each"
	@echo "make test-layouts  every combination of settings where the other tests take a covering few: hours"
	@echo "make docs       the documentation as a site in .docs-site; writes docs/reference from the code first"
	@echo "make check      ruff and pyright"
	@echo "make format     let ruff format the code"
	@echo "make clean      remove the virtual environment and what tools left behind"

$(VENV)/core: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"mtjax needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/dev: $(VENV)/core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(VENV)/docs: $(VENV)/core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

# torch from PyPI brings gigabytes of CUDA libraries; TORCH=torch==VERSION names a build without them where there is one.
TORCH ?= torch
$(VENV)/extras: $(VENV)/dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,aot,parity,store-tests]'
	@touch $@

train: $(VENV)/core
	$(BIN)/mtjax train $(ARGS)

# Each worker is a process with its own compiled programs: tests/conftest.py says which tests of `make test` share some.
# Bytecode is written, whatever the environment says: hundreds of processes would compile the package, and each worker
# rewrite the assertions of all tests.
WORKERS ?= 2
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --durations=10 --durations-min=1

test: $(VENV)/dev
	$(PYTEST) --dist loadgroup --no-loadscope-reorder -m 'not (long or exhaustive or aot or torch)' --ignore tests/parity $(ARGS)

test-all: $(VENV)/extras
	$(PYTEST) --dist loadfile --no-loadscope-reorder -m '(long or aot or torch) and not exhaustive' $(ARGS)

# The newest jax needs a newer Python than the oldest that mtjax supports: one on the path, or one of pyenv's.
NEWEST ?= $(shell for p in python3.12 python3.13 python3.14 $(HOME)/.pyenv/versions/3.1[2-4]*/bin/python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
NEWEST_VENV ?= .venv-newest
# Or another one: `make test-newest NEWEST_JAX=jax==0.12.0.1`.
NEWEST_JAX ?= jax

has-newest:
	@test -n "$(NEWEST)"

$(NEWEST_VENV)/done: pyproject.toml
	@test -n "$(NEWEST)" || { echo "make test-newest needs Python 3.12 or newer, as the newest jax does, and finds none: make test-newest NEWEST=/path/to/python3.12" >&2; exit 1; }
	$(NEWEST) -m venv --clear $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,aot]' '$(NEWEST_JAX)'
	@touch $@

test-newest: $(NEWEST_VENV)/done
	@$(NEWEST_VENV)/bin/python -c 'import sys, jax; print("jax", jax.__version__, "on Python", sys.version.split()[0])'
	$(NEWEST_VENV)/bin/python -m pytest -n $(WORKERS) --durations=10 --durations-min=1 --dist loadfile -m 'not (long or exhaustive or torch)' tests/inspect $(ARGS)

test-faults: $(VENV)/extras
	$(BIN)/python -m tests.faults $(ARGS)

docs: $(VENV)/docs
	$(BIN)/python docs/make_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

test-layouts: $(VENV)/extras
	$(BIN)/python -m pytest -m exhaustive $(ARGS)

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(NEWEST_VENV) .pytest_cache .ruff_cache .hypothesis build dist
