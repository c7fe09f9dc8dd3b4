# SPDX-License-Identifier: Apache-2.0
# Every target sets .venv up first when it is missing or its pins changed, and costs nothing for that afterwards.

PYTHON_VENV := .venv/bin/python
# Which tests run: everything that needs no Gaudi. On a Gaudi machine: make e2e MARKERS=hpu WORKERS=0
MARKERS     ?= not hpu
# Where end-to-end tests are looked for, e.g. make e2e E2E=tests/e2e/test_serve.py
E2E         ?= tests/e2e
# More arguments for pytest, e.g. make unit PYTEST_ARGS="-k slots -x"
PYTEST_ARGS ?=
# More arguments for the two parts of the benchmark, e.g. make bench BENCH_ARGS="--sizes tiny" SERVE_ARGS="--repeats 1"
BENCH_ARGS  ?=
SERVE_ARGS  ?=
# pytest processes at a time; tests that share one Gaudi need WORKERS=0
WORKERS     ?= 2
CACHE       := $(CURDIR)/.cache

# One OpenMP thread: on a busy machine two are 10 to 50 times slower. The engine stays in the test's process, nothing is asked
# of a hub, nothing is reported, and vLLM's model inspection is remembered between runs.
RUN_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CACHE_ROOT=$(CACHE)/vllm
TEST_ENV := $(RUN_ENV) VLLM_ENABLE_V1_MULTIPROCESSING=0

# At run time this would silently select vLLM's own CPU platform.
unexport VLLM_TARGET_DEVICE
export PYTHONUNBUFFERED := 1

.NOTPARALLEL:
.PHONY: help install demo test unit e2e soak lint format docs bench wheel clean distclean

help: ## this list
	@grep -hE '^[a-z0-9]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: ## set .venv up, or do nothing when it is
	@sh tools/install.sh

demo: install ## serve a tiny GDN hybrid with vLLM and chat with it over the OpenAI API
	@$(RUN_ENV) $(PYTHON_VENV) tools/demo.py

test: lint unit e2e ## lint, unit and e2e: what CI runs

unit: install ## fast tests of single modules
	@echo "== unit tests"
	@$(TEST_ENV) $(PYTHON_VENV) -m pytest tests/unit -m "$(MARKERS)" -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

e2e: install ## tests through vLLM's engine
	@echo "== end-to-end tests"
	@$(TEST_ENV) $(PYTHON_VENV) -m pytest $(E2E) -m "$(MARKERS)" -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

soak: install ## for hours: all of what is exhaustive, and much more of what is random, than make test has time for
	@for tests in tests/unit $(E2E); do \
		echo "== soak of $$tests"; \
		$(TEST_ENV) $(PYTHON_VENV) -m pytest $$tests --soak -m "($(MARKERS)) and (soak or random or hypothesis)" \
			-n $(WORKERS) --dist worksteal --timeout 86400 $(PYTEST_ARGS) || exit; \
	done

lint: install ## ruff, mypy and hadolint
	@echo "== lint"
	@$(PYTHON_VENV) -m ruff check .
	@$(PYTHON_VENV) -m ruff format --check .
	@$(PYTHON_VENV) -m mypy
	@.venv/bin/hadolint docker/*

format: install ## let ruff sort imports and format
	@$(PYTHON_VENV) -m ruff check --fix .
	@$(PYTHON_VENV) -m ruff format .

docs: install ## the documentation site in .cache/site, its generated parts brought up to date
	@$(PYTHON_VENV) -m tools.docs build

bench: install ## caching on beside caching off, in process and served; under 15 minutes on two cores
	@$(RUN_ENV) $(PYTHON_VENV) -m benchmarks cache $(BENCH_ARGS)
	@$(RUN_ENV) $(PYTHON_VENV) -m benchmarks serve $(SERVE_ARGS)

wheel: install ## a wheel in dist/, without network
	@rm -rf build dist
	@$(PYTHON_VENV) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@rm -rf build
	@ls dist

clean: ## remove what tests, demo and builds made; .venv stays
	rm -rf .cache build dist *.egg-info .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	rm -rf .venv
