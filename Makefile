# Nearkin. `make` prints the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
INPUTS := pyproject.toml setup.py requirements/build.txt requirements/dev.txt \
  $(wildcard shared/nearkin_shared/kernels/native/_*.pyx shared/nearkin_shared/kernels/native/*.c shared/nearkin_shared/kernels/native/*.h)
export NEARKIN_KERNELS ?= cython

.PHONY: help setup demo serve test coverage soak man check types up down status bench clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with nearkin, its kernels built, and the tools for tests

$(STAMP): $(INPUTS) tools/system-packages
	@bash tools/system-packages
	@bash tools/make-venv $(VENV)
	@touch $@

demo: setup ## store three releases of a real package, show the savings, restore and compare them
	@$(BIN)/python -m tests.support.demo

serve: setup ## serve a store with something in it, .serve/store, and the dashboard, until Ctrl-C
	@$(BIN)/python -m tests.support.serve
	@$(BIN)/nearkin serve .serve/store || [ $$? = 130 ]

test: setup ## run every test
	@bash tools/system-packages test
	@$(BIN)/python -m tests.support.servers.programs
	@$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

coverage: setup ## the tests that need no failing server, measured: fails below the floor in pyproject.toml
	@bash tools/system-packages test
	@$(BIN)/python -m tests.support.servers.programs
	@mkdir -p build/coverage
	@$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --cov --cov-report=term \
	  tests/unit tests/property tests/conformance tests/equivalence tests/golden tests/integration tests/e2e \
	  --deselect tests/e2e/test_cli_usage.py::test_help_imports_neither_numpy_nor_pydantic_nor_rich \
	  --deselect tests/integration/services/test_rebalance.py::test_service_ends_with_any_of_its_threads # tracing changes both

soak: setup ## the engines' long runs: planted bugs, power cuts, races, 2,000 kills, 90 of services, 20,000 flipped bits (two hours; prints seeds)
	@$(BIN)/python -m tests.support.engines.mutation_engine
	@$(BIN)/python tests/support/mutation.py
	@$(BIN)/python -m tests.support.engines.soak --disk
	@$(BIN)/python -m pytest -q -m soak
	@SOAK=1 $(BIN)/python -m pytest -q tests/fault/test_gc_death.py tests/fault/test_races.py tests/fault/test_gc_during_puts.py
	@$(BIN)/python -m tests.support.engines.soak --kills 2000
	@$(BIN)/python -m tests.support.engines.service_crash --kills 90
	@$(BIN)/python -m tests.support.engines.bitflips --flips 10000
	@$(BIN)/python -m tests.support.engines.bitflips --flips 10000 --parity rs-8-2
	@$(BIN)/python -m tests.support.engines.bitflips --flips 5000 --parity rs-8-2 --encrypted

man: setup ## write the manual pages of the command to build/man/man1
	@$(BIN)/nearkin docs man build/man/man1

fuzz: setup ## 200,000 changed inputs for each parser; prints the seed, keeps what is at fault in fuzz-faults/
	@$(BIN)/python -m tests.support.fuzzing.fuzz --inputs 200000 --regressions tests/fuzz --keep fuzz-faults

asan: setup ## the kernels' tests and 10 million inputs of the VCDIFF decoder under Address- and UBSanitizer
	@bash tools/asan $(VENV) 10000000

check: setup ## ruff, ruff format, mypy strict, import-linter, structure, vocabulary, the generated client, spelling, workflows, documentation site, collection of all tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python tools/check_structure.py
	@$(BIN)/python tools/check_vocabulary.py
	@$(BIN)/python tools/make_sync_client.py --check
	@$(BIN)/codespell
	@$(BIN)/zizmor --quiet --offline --no-progress .github
	@$(BIN)/python -m pytest --collect-only --quiet >/dev/null
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

types: setup ## pyright --verifytypes nearkin: the types of all public names are complete
	@bash tools/check-public-types $(VENV)

up: setup ## start Kafka, Redis, workers and a gateway on this machine; write .cluster/env (S3=1: an S3 server, too)
	@bash tools/system-packages cluster
	@$(BIN)/python -m tests.support.servers.cluster up $(if $(S3),--s3)

down: setup ## end what `make up` started; its data stay in .cluster/
	@$(BIN)/python -m tests.support.servers.cluster down

status: setup ## say what of it runs, and what has ended by itself
	@$(BIN)/python -m tests.support.servers.cluster status

bench: setup ## nearkin bench: kernels, pairs of similar chunks, whole stores against restic, borg, kopia and zstd
	@$(BIN)/nearkin bench kernels
	@$(BIN)/nearkin bench pairs --corpus botocore,rdb,vm
	@$(BIN)/nearkin bench store --corpus botocore

clean: ## remove what the other targets made
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find app shared services -name '*.so' -delete
	rm -f shared/nearkin_shared/kernels/native/_*.c
