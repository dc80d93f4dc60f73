# Everything runs in .venv, which each target makes for itself. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCHMARKS := $(wildcard benchmarks/bench_*.py)
# Test files run side by side, so many at a time; each library has one thread, and cores go to processes first. Trials that
# train on all cores wait for each other without spinning: two at once would burn five times what they take alone.
# Files are begun in their order: by their number of tests, xdist's own, the few long tests would be the last.
WORKERS ?= 2
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
# What `make versions` runs in each environment: all that imports no torch, and what holds on to private names of libraries.
VERSION_TESTS := $(addprefix tests/unit/,core config store search report) tests/unit/meta \
	$(addprefix tests/contract/test_,plan_traces_the_step.py plan_fake_cuda.py load_architectures.py)

.DEFAULT_GOAL := help
.PHONY: help setup demo test proof chaos lint soak bench gpu gpu-memory clean engines wheel-test versions

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/'

setup: $(STAMP) ## make .venv with every pinned dependency

# torch goes first and by its pin alone: resolved together with the rest, pip may take a build of several gigabytes.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dryfit needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,dev]'
	touch $@

engines: ## install the programs that tests run, as Debian packages: as root, or by sudo
	@$(PYTHON) scripts/engines.py

demo: $(STAMP) ## search hyperparameters of a small encoder on synthetic posts; runs again where it stopped
	test -e demo/study.toml || $(BIN)/dryfit init demo
	HF_HUB_OFFLINE=1 $(BIN)/dryfit tune demo/study.toml

test: $(STAMP) ## unit, property, contract and chaos tests, under ten minutes on two cores
	$(TEST_ENV) $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not slow and not chaos_long and not gpu'

proof: $(STAMP) ## the tests that take longer, under half an hour on two cores
	@$(TEST_ENV) $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'slow and not chaos_long and not gpu'; status=$$?; \
	if [ $$status -eq 5 ]; then echo 'no test is marked slow'; exit 0; fi; exit $$status

chaos: $(STAMP) ## real faults and the long storms of kills (long); CHAOS_SEED=N repeats a storm
	$(TEST_ENV) $(BIN)/python -m pytest tests/chaos -m 'not gpu'

lint: $(STAMP) ## ruff, pyright and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

wheel-test: $(STAMP) ## build wheel and sdist, install the wheel with its extras in a new environment, and use it
	$(BIN)/python scripts/wheel_test.py

versions: $(STAMP) ## tests on the lowest and highest versions allowed, on each Python; gigabytes, one run at a time
	$(TEST_ENV) $(BIN)/python scripts/versions.py $(VERSION_TESTS)

soak: $(STAMP) ## 5 000 tiny trials in one run: nothing may grow; 10 to 30 minutes on two cores, prints a table
	$(TEST_ENV) $(BIN)/python benchmarks/soak.py

bench: $(STAMP) ## print the measured numbers that docs/benchmarks.md keeps
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done

gpu: $(STAMP) ## the tests that need a CUDA device
	$(TEST_ENV) $(BIN)/python -m pytest tests/gpu -m gpu

gpu-memory: $(STAMP) ## hold plans against a CUDA device, 75 configurations; goes on where it stopped
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gpu_memory.py --out gpu-memory

clean: ## remove .venv, the demo and all caches
	rm -rf $(VENV) demo gpu-memory build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
