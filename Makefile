# Each command sets up what it lacks. `make help` lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON_BIN := .venv/bin/python
STAMP := .venv/setup.stamp
DOCS_STAMP := .venv/docs.stamp
BENCH_STAMP := .venv-bench/setup.stamp

# Where a run of `make train` keeps its checkpoints and its TensorBoard files.
LOGDIR ?= runs/digits
MODEL ?= image.digits.ConvNet
# Test processes: each imports TensorFlow once. One more than two cores, since some tests wait.
JOBS ?= 3
# More arguments for the program that a command runs: make test ARGS='-k dense'.
ARGS ?=

export TF_CPP_MIN_LOG_LEVEL ?= 2
# The folder of data shared between checkouts, where there is one beside this checkout.
ifneq ($(wildcard ../shared),)
export LINGVO_GPIPE_SHARED ?= $(abspath ../shared)
endif

# Python keeps what it compiles, also where the shell says not to: the rewriting of the assertions
# costs each test process five seconds, and every program that a test starts compiles the library.
# A test process that crashes ends the run: pytest-xdist 3.8 may wait for ever for its replacement.
PYTEST = PYTHONDONTWRITEBYTECODE= $(PYTHON_BIN) -m pytest --numprocesses=$(JOBS) --dist=worksteal \
  --max-worker-restart=0

.PHONY: help setup bench-setup train test coverage lint bazel sameness keras-hub reliability docs clean

help: ## List the commands.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with the pinned packages and this checkout in it.

$(STAMP): requirements.txt pyproject.toml tools/setup.sh
	@tools/setup.sh
	@touch $@

bench-setup: $(BENCH_STAMP) ## Make .venv-bench with PyTorch, for benchmarks.rivals.

$(BENCH_STAMP): requirements-bench.txt
	@python3 -m venv --clear .venv-bench
	@.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

train: $(STAMP) ## Train a pipelined network on handwritten digits (LOGDIR=, MODEL=).
	@$(PYTHON_BIN) -m lingvo_gpipe.trainer --model=$(MODEL) --logdir=$(LOGDIR) --mode=train_eval $(ARGS)

test: $(STAMP) ## Run the tests, the whole grids left out.
	@$(PYTEST) --dist=loadfile --durations=10 $(ARGS)

coverage: $(STAMP) ## Run the tests and list the lines and branches that none of them reaches.
	@$(PYTEST) --dist=loadfile --cov --cov-report=term-missing:skip-covered $(ARGS)

lint: $(STAMP) ## Check style, format and types.
	@$(PYTHON_BIN) -m ruff check
	@$(PYTHON_BIN) -m ruff format --check
	@$(PYTHON_BIN) -m mypy

bazel: $(STAMP) ## Run every test as a Bazel target (installs Debian's Bazel where there is none).
	@tools/bazel/bazel.sh test //... $(ARGS)

sameness: $(STAMP) ## Compare the pipeline with the plain network over the whole grid.
	@$(PYTEST) -m sameness_grid $(ARGS)

keras-hub: $(STAMP) ## Compare every model of KerasHub, as a pipeline, with the model itself.
	@$(PYTEST) -m 'keras_hub_whole or not keras_hub_whole' tests/keras_hub $(ARGS)

reliability: $(STAMP) ## Kill runs at random instants, fill disks, damage files, try an accelerator's questions: the whole set.
	@$(PYTEST) -m reliability_full $(ARGS)

docs: $(DOCS_STAMP) ## Build the documents and the API reference into build/site; warnings are errors.
	@NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/.venv/bin:$$PATH" $(PYTHON_BIN) -m mkdocs build --strict --quiet

$(DOCS_STAMP): requirements-docs.txt $(STAMP)
	@echo 'docs: installing requirements-docs.txt into .venv'
	@$(PYTHON_BIN) -m uv pip install --quiet --python $(PYTHON_BIN) -r $< || \
	  $(PYTHON_BIN) -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

clean: ## Remove what was made here, except runs/.
	@rm -rf .venv .venv-bench build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
