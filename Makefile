# `make serve` and `make test` work on a fresh clone: each installs what it needs into .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  ?=
ARGS   ?=

# What the installed package is built from: a change here installs again.
NATIVE_SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc -type f 2>/dev/null)

.PHONY: serve test lint types unit clean

serve: $(VENV)/.installed
	$(BIN)/octavo serve $(MODEL) $(ARGS)

test: lint types unit

lint: $(VENV)/.installed-test
	$(BIN)/ruff check octavo tests
	$(BIN)/ruff format --check octavo tests

types: $(VENV)/.installed-test
	$(BIN)/mypy

unit: $(VENV)/.installed-test
	$(BIN)/python -m pytest

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Octavo needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python $(NATIVE_SOURCES)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# PyTorch is the oracle of the model tests; the exact version first and alone, so that nothing else chooses a bigger one.
$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[test,oracle,dev]'
	touch $@

clean:
	rm -rf $(VENV) build
