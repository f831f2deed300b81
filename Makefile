# Two commands matter: `make demo` and `make test`. Both make their environment in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RELEASES ?= 0.5.16 0.5.17 0.5.18
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-live test-all mutations check format docs corpus bench clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "padtrace needs Python 3.11 or newer; set PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# The stamps hold a copy of what was installed, so a change of either file installs again.
$(VENV)/.base: pyproject.toml setup.py $(wildcard padtrace/record/_native.c padtrace/record/native_c/*.h) | $(BIN)/python
	@echo "installing padtrace into $(VENV)"
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

$(VENV)/.replay: requirements/replay.txt $(VENV)/.base
	@echo "installing what SGLang needs to be imported on a CPU (about 2.5 GB, some minutes)"
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/torch.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/replay.txt -r requirements/torch.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/torchvision.txt
	@touch $@

demo: $(VENV)/.replay ## set everything up and replay two shipped recordings through real SGLang
	@$(BIN)/python scripts/demo.py

test: $(VENV)/.replay ## set everything up and run the tests, the live crash included
	$(BIN)/padtrace releases fetch $(RELEASES)
	$(PYTEST) -m "live_default or not (live or slow or hours)"

test-live: $(VENV)/.replay ## the slow tests, and those against further live servers
	$(BIN)/padtrace releases fetch $(RELEASES) 0.5.20 0.5.23
	$(PYTEST) -m "slow or (live and not live_default)"

mutations: $(VENV)/.base ## change every shipped recording 20,000 times: two hours of a processor or more
	$(PYTEST) -m hours

corpus: $(VENV)/.replay ## replay the corpus of reports and healthy baselines on seven releases
	$(BIN)/python scripts/corpus.py

check: $(VENV)/.replay ## lint, format and type checks (mypy reads the types of torch)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.base ## format the code
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

docs: $(VENV)/.base ## write the generated pages again
	$(BIN)/python scripts/generate_docs.py

clean: ## remove the environment and the caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
