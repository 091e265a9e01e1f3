PYTHON ?= python3
JOBS ?= 2
PROFILE ?= quick
PORT ?= 5000

BIN := .venv/bin
STAMP := .venv/.stamp
# Sweeps run several processes side by side; one torch thread each is fastest on few cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

# As kvlab.lib.environment sets them in kvlab's own processes, for kernels that pytest and nbconvert start.
ifndef OMP_WAIT_POLICY
export GOMP_SPINCOUNT ?= 2000
endif
export ONEDNN_PRIMITIVE_CACHE_CAPACITY ?= 256
export LRU_CACHE_CAPACITY ?= 256
export MLFLOW_DISABLE_TELEMETRY ?= true
export DO_NOT_TRACK ?= true

.DEFAULT_GOAL := help
.PHONY: help env pull reproduce lint check coverage results docs wheel hooks test test-unit test-notebooks test-long test-all test-lowest test-models browser notebooks lab clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(STAMP)  ## the environment in .venv, with the pinned versions

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "kvlab needs Python 3.11 or newer, and '$(PYTHON)' is not that; name one with: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
	  exit 1; }
	@test ! -L .venv || { echo ".venv is a link: its environment would point to this folder afterwards; remove the link" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu it needs the package python3-venv" >&2; exit 1; }
	@echo "installing the pinned packages into .venv (2 to 4 minutes the first time) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[lab,test,docs,lm-eval,math]'
	@touch $@

pull: $(STAMP)  ## the default model and the texts, into the user's cache
	@$(BIN)/kvlab pull

reproduce: pull  ## all experiments, then the table of claims and the report
	@$(BIN)/kvlab reproduce --profile $(PROFILE) --jobs $(JOBS)

lint: $(STAMP)  ## ruff (format and rules) and pyright: no finding is left
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/pyright

check: lint  ## lint, and the tests of what has changed since the last commit: before each commit
	@$(ONE_THREAD) $(BIN)/python tests/support/changed.py

coverage: pull browser  ## the unit tests, with the share of the package's lines that they run
	@$(ONE_THREAD) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --cov --cov-report=term:skip-covered tests

results: $(STAMP)  ## the tables and sentences of README and docs/, from the kept ledgers
	@$(BIN)/python docs/site/results.py

docs: $(STAMP)  ## the documentation's site, in build/docs/html: a warning fails it
	@$(BIN)/python docs/site/build.py

wheel: $(STAMP)  ## the wheel, in dist/: pip install it into any environment
	@$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist . && ls dist/kvlab-*.whl

hooks: $(STAMP)  ## make lint before each commit
	@printf '#!/bin/sh\nexec make lint\n' > "$$(git rev-parse --git-path hooks)/pre-commit" && chmod +x "$$(git rev-parse --git-path hooks)/pre-commit"

test: lint test-unit test-notebooks  ## unit tests, and every notebook through nbval
test-all: test test-long  ## what CI runs: make test, then make test-long

# A file's tests run on one worker, so that what they share is made once; tests/conftest.py has the longest files begin first.
test-unit: pull browser
	@$(ONE_THREAD) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not models and not long' tests

test-long: pull browser  ## servers, kills, sweeps, environments, whole notebooks, a browser, every example of the docs
	@$(ONE_THREAD) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'long and not models' tests

# A store of its own for the notebooks' runs, so that tests never write to mlruns/. The longest notebooks begin first;
# in the end what all of them logged is looked at.
test-notebooks: pull
	@store=$$(mktemp -d) && trap 'rm -rf "$$store"' EXIT && \
	export MLFLOW_TRACKING_URI="sqlite:///$$store/mlflow.db" $(ONE_THREAD) && \
	notebooks=$$($(BIN)/python -c 'from kvlab.workbench import experiments; print(*experiments.longest_first())') && \
	$(BIN)/python -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=600 \
	  -n $(JOBS) --dist loadfile --no-loadscope-reorder -p no:cacheprovider $$notebooks && \
	$(BIN)/python -m pytest -q -n 0 -p no:cacheprovider tests/after_notebooks.py

# An environment of its own with the base dependencies alone: experiments need more, and newer. Left out: with older
# transformers RocketKV on a random Llama 4 gives another token where a padded prompt comes in pieces, and RecurrentGemma
# is refused in other words.
LOWEST := .venv-lowest/bin/python
OTHER := --deselect 'tests/core/test_refusals.py::test_it_is_refused_before_its_weights_are_read[recurrent_gemma]' \
  --deselect 'tests/live/test_hybrid_live.py::test_a_prompt_in_pieces_is_one_prompt[rocketkv-hybrid-llama4]'
test-lowest:  ## the tests of policies, traces, replays and live runs with the lowest versions, in .venv-lowest
	@test -x $(LOWEST) || $(PYTHON) -m venv .venv-lowest
	@echo "installing the lowest versions into .venv-lowest (2 to 4 minutes the first time) ..."
	@$(LOWEST) -m pip install -q --disable-pip-version-check -c constraints-lowest.txt -e . \
	  hypothesis pytest pytest-timeout pytest-xdist
	@$(ONE_THREAD) $(LOWEST) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not models and not long' \
	  $(OTHER) tests/core tests/methods tests/traces tests/replays tests/live

test-models: $(STAMP)  ## the other models of the catalogue (2 GB to fetch, 5 GB on the disk), and the tests that need them
	@$(BIN)/kvlab pull qwen2.5-coder-0.5b qwen2.5-coder-1.5b gemma-3-270m
	@$(BIN)/python -m pytest -n 0 -m models tests

browser:  ## Debian's chromium for the tests that need a browser, if there is none and apt-get may install it
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  command -v $$name >/dev/null && exit 0; done; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	  echo "installing chromium with apt-get ..."; \
	  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium \
	    fonts-liberation; } >/dev/null 2>&1 && exit 0; fi; \
	echo "there is no chromium, and it cannot be installed here: the tests that need a browser are skipped"

NOTEBOOKS ?= notebooks/*.ipynb
notebooks: pull  ## run every notebook where it stands and save its outputs (one: NOTEBOOKS=notebooks/NAME.ipynb)
	@store=$$(mktemp -d) && trap 'rm -rf "$$store"' EXIT && \
	export MLFLOW_TRACKING_URI="sqlite:///$$store/mlflow.db" && \
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace $(NOTEBOOKS)

lab: $(STAMP)  ## JupyterLab on copies of the notebooks (in lab/), and the MLflow UI
	@exec $(BIN)/kvlab lab --port $(PORT)

clean:  ## remove the environment and what runs left behind, but not the store of runs
	rm -rf .venv .venv-lowest build dist report .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
