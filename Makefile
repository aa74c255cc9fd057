# Everything from nothing: `make demo` and `make test` need only python3 and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
WANTED := --editable '.[all]' --group dev
WORKERS ?= 2
DOCS := build/docs-env

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench docs clean

help:
	@echo "make demo   train a small adapter on drawn flowers, caption pictures, print the table"
	@echo "make test   run the tests"
	@echo "make lint   check style and types"
	@echo "make bench  time the core and the decoding against other implementations"
	@echo "make docs   build the documentation into build/site; a dead link is an error"
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

# An environment of its own: the reference is read from the source, so that it needs no torch, and takes seconds.
$(DOCS)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check install -qq --upgrade 'pip>=25.1'
	@$(DOCS)/bin/python -m pip --disable-pip-version-check install -qq --group docs
	@touch $@

docs: $(DOCS)/.installed
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
