# `make serve` and `make test` work on a fresh clone: each installs what it needs into .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  ?=
ARGS   ?=

# What the installed package is built from: a change here installs again.
NATIVE_SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc -type f -not -path '*/tests/*' 2>/dev/null)

# The kernels' own tests: C++ only. CMake is the system's where it is new enough, else the one on the package index.
SYSTEM_CMAKE := $(shell cmake --version 2>/dev/null | awk 'NR == 1 { split($$3, v, "."); if (v[1] * 1000 + v[2] >= 3020) print "cmake" }')
CMAKE  ?= $(or $(SYSTEM_CMAKE),$(BIN)/cmake)
JOBS   := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
TESTS  := octavo_kernel_tests
ARM    := aarch64-linux-gnu
QEMU   := qemu-aarch64 -L /usr/$(ARM)

.PHONY: serve test test-clients test-schemas fuzz-api lint types unit native native-arm clean

serve: $(VENV)/.installed
	$(BIN)/octavo serve $(MODEL) $(ARGS)

test: lint types native unit

lint: $(VENV)/.installed-test
	$(BIN)/ruff check octavo tests
	$(BIN)/ruff format --check octavo tests

types: $(VENV)/.installed-test
	$(BIN)/mypy

unit: $(VENV)/.installed-test
	$(BIN)/python -m pytest

# Other people's clients against the server with a real model: the npm client, langchain-openai, litellm, llama-index.
test-clients: $(VENV)/.installed-test build/clients/.installed
	$(BIN)/python -m pytest tests/clients -rA

build/clients/.installed: tests/clients/node/package.json tests/clients/frameworks/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv build/clients/venv
	build/clients/venv/bin/python -m pip install --quiet -r tests/clients/frameworks/requirements.txt
	mkdir -p build/clients/node
	cp tests/clients/node/package.json build/clients/node/
	@if command -v npm >/dev/null; then cd build/clients/node && npm install --no-package-lock --no-audit --no-fund; \
	else echo "test-clients: the npm client is skipped, there is no npm (Debian's packages nodejs and npm)"; fi
	touch $@

# Thousands of requests made from our own OpenAPI, to a fake engine and to a real model.
fuzz-api: $(VENV)/.installed-test build/fuzz/.installed
	$(BIN)/python -m pytest tests/fuzz -rA

build/fuzz/.installed: tests/fuzz/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv build/fuzz
	build/fuzz/bin/python -m pip install --quiet -r tests/fuzz/requirements.txt
	touch $@

# All schemas, three seeds at two temperatures each; `make test` asks for a sample.
test-schemas: $(VENV)/.installed-test
	OCTAVO_ALL_SCHEMAS=1 $(BIN)/python -m pytest tests/system/test_schemas.py -rA

# Twice: as users get them, and with the address and undefined-behaviour sanitizers.
native: $(filter $(BIN)/cmake,$(CMAKE))
	$(CMAKE) -S . -B build/native -DOCTAVO_BUILD_TESTS=ON >/dev/null
	$(CMAKE) --build build/native --parallel $(JOBS) >/dev/null
	build/native/$(TESTS)
	$(CMAKE) -S . -B build/native-sanitized -DOCTAVO_BUILD_TESTS=ON -DOCTAVO_SANITIZE=ON >/dev/null
	$(CMAKE) --build build/native-sanitized --parallel $(JOBS) >/dev/null
	build/native-sanitized/$(TESTS)

# The same program for 64-bit Arm, emulated: a processor with the dot product of bytes, and one without.
native-arm: $(filter $(BIN)/cmake,$(CMAKE))
	@if ! command -v $(ARM)-g++ >/dev/null || ! command -v qemu-aarch64 >/dev/null; then \
	  echo "native-arm: skipped, it needs Debian's packages g++-$(ARM) and qemu-user"; exit 0; fi; \
	set -ex; \
	$(CMAKE) -S . -B build/native-arm -DOCTAVO_BUILD_TESTS=ON \
	  -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/csrc/cpu/tests/aarch64.cmake >/dev/null; \
	$(CMAKE) --build build/native-arm --parallel $(JOBS) >/dev/null; \
	$(QEMU) -cpu max build/native-arm/$(TESTS) neondot neon scalar; \
	$(QEMU) -cpu cortex-a72 build/native-arm/$(TESTS)

$(BIN)/cmake: $(BIN)/python
	$(BIN)/python -m pip install --quiet 'cmake>=3.20'
	touch $@

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
