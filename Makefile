# Everything from nothing: `make demo` and `make test` need only python3 and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
WANTED := --editable '.[all]' --group dev
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench clean

help:
	@echo "make demo   train a small adapter on drawn flowers, caption pictures, print the table"
	@echo "make test   run the tests"
	@echo "make lint   check style and types"
	@echo "make bench  time the core and the decoding against other implementations"
	@echo "make clean  remove the environment and everything that was built"

# Python itself comes from `python3`; uv, where it can be had, only makes the installing fast.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("mmattn needs Python 3.10 or newer, $(PYTHON) is %d.%d" % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml | $(BIN)/python
	@test -x $(BIN)/uv || $(PIP) install -qq uv || echo "no uv to be had, going on with pip"
	@echo "installing mmattn with all its extras (the first time downloads torch: some minutes)"
	@if test -x $(BIN)/uv && $(BIN)/uv pip install --quiet --python $(BIN)/python $(WANTED); then :; else \
	    echo "installing with pip" && $(PIP) install -qq --upgrade 'pip>=25.1' && $(PIP) install -qq $(WANTED); \
	fi
	@touch $@

setup: $(STAMP)

demo: $(STAMP)
	@$(BIN)/mmattn demo

# One thread per worker: two workers with two threads each fight over two cores.
test: $(STAMP)
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(STAMP)
	@$(BIN)/python -m recipes.benchmarks

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
