# `make demo` and `make test` need nothing but Python 3.11+ and make. Everything is put into .venv beside this file.
#   make demo ARGS="--html demo.html"                            pass options on
#   make test PYTHON=python3.12                                  another Python
#   make demo PIP_ARGS="--extra-index-url https://..."           another package index, e.g. for a CPU build of torch
#   make demo CONSTRAINTS=                                       newest versions rather than the pinned ones

PYTHON ?= $(firstword $(foreach python,python3 python3.14 python3.13 python3.12 python3.11,$(shell $(python) -c 'import sys; sys.version_info >= (3, 11) and print("$(python)")' 2>/dev/null)))
CONSTRAINTS ?= constraints.txt
PIP_ARGS ?=
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) $(PIP_ARGS)

.PHONY: help demo serve test test-all fuzz soak bench lint model clean
.DEFAULT_GOAL := help

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(STAMP) ## a long prompt into eight running streams, under each policy (about two minutes)
	@$(BIN)/stallfree demo $(ARGS)

serve: $(STAMP) ## the server with the OpenAI API on http://127.0.0.1:8000
	@$(BIN)/stallfree serve $(ARGS)

test: $(STAMP) model ## all tests but the slow ones
	@$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-all: $(STAMP) model ## all tests
	@$(BIN)/python -m pytest $(ARGS)

fuzz: $(STAMP) model ## 20,000 requests that are wrong, and thousands that the API's description allows
	@$(BIN)/python -m pytest tests/deploy/test_fuzz.py tests/deploy/test_openapi.py $(ARGS)

soak: $(STAMP) model ## mixed load, aborts and kills for 30 minutes; ARGS="--minutes 8" for fewer
	@$(BIN)/python -m benchmarks.soak $(ARGS)

bench: $(STAMP) model ## speed on this machine, as one table with the aims beside it
	@$(BIN)/python -m benchmarks.table $(ARGS)

lint: $(STAMP) ## ruff, and mypy --strict on the four packages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict

model: $(STAMP) ## fetch and convert the embedded model into the cache
	@$(BIN)/stallfree fetch

clean: ## remove the environment and what tools left behind (not the model cache)
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted installation is taken up again, and a finished one costs nothing.
$(STAMP): pyproject.toml $(wildcard $(CONSTRAINTS))
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "Python 3.11 or newer is needed; install it, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv .venv \
		|| { echo "this Python cannot create environments; install its venv package (Debian: python3-venv)" >&2; exit 1; }
	$(PIP) --upgrade pip
	$(PIP) --editable ".[dev]"
	@touch $@
