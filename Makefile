# Makes .venv; 3.11 or newer: make setup PYTHON=python3.12
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Worker processes of the test run
N ?= 2
PROJECTS := $(patsubst %/pyproject.toml,%,$(wildcard packages/*/pyproject.toml) harness/pyproject.toml)

.PHONY: help setup demo test test-deep check wheels bench instructions format clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf '%-12s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## Create .venv and install everything into it, when something changed

# Without the stamp .venv is cleared: what a failed setup left may be of another Python.
$(STAMP): requirements-dev.txt pyproject.toml $(PROJECTS:%=%/pyproject.toml) packages/cuda/setup.py $(wildcard packages/cuda/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is no Python 3.11 or newer; name one, as in: make setup PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(if $(wildcard $@),,--clear) .venv
	rm -f packages/cuda/src/graphreplay_cuda/_native*.so # an older one would stay where the compiler fails
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	touch $@

demo: setup ## Run the demo; options in ARGS="..."
	$(BIN)/python -m graphreplay_harness.demo $(ARGS)

# One thread per process: the workers share the cores already.
test: setup ## Run the tests; N=1 for one process, ARGS="..." for pytest's options
	OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -n $(N) $(ARGS)

test-deep: setup ## Run every test, the long ones too, with many more examples
	OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -n $(N) -m "" $(ARGS)

check: setup ## Lint, type-check, check imports and files, then the wheels
	$(BIN)/pre-commit run --all-files --show-diff-on-failure
	$(MAKE) wheels
	$(BIN)/python tools/check_wheels.py dist

wheels: setup ## Build the wheel of every package into dist/
	rm -rf dist
	for project in $(PROJECTS); do $(BIN)/python -m build --wheel --no-isolation --outdir dist $$project || exit; done

bench: setup ## Time the benchmark cases; ARGS="..." for pytest's options
	$(BIN)/python -m pytest harness/benchmarks --benchmark-enable --benchmark-only $(ARGS)

instructions: setup ## Count the instructions of the benchmark cases with valgrind; options in ARGS="..."
	$(BIN)/python -m graphreplay_harness.bench_instructions $(ARGS)

format: setup ## Sort imports, fix what ruff can, format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove everything built or cached, but not .venv and what it runs
	rm -rf dist build packages/*/src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .benchmarks
	find packages harness tests tools -name __pycache__ -prune -exec rm -rf {} +
