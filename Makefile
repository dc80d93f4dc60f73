# Everything runs in .venv, which each target makes for itself. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SITE_STAMP := $(VENV)/.site
BENCHMARKS := $(wildcard benchmarks/bench_*.py)
# Test files run side by side, so many at a time; each library has one thread, and cores go to processes first. Trials that
# train on all cores wait for each other without spinning: two at once would burn five times what they take alone.
# Three on two cores: while tests wait for processes that they started, another one runs. Which file is begun first:
# conftest.py, by tests/durations.json.
WORKERS ?= 3
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest $(SIDE_BY_SIDE)
NEVER := not chaos_long and not gpu and not nodes
QUICK := not slow and not nightly and $(NEVER)
BASE ?= HEAD
# Where a run of tests leaves what each of them took: .ci/run does, too.
TIMES ?= build/test-times
# What `make versions` runs in each environment besides `make check`: what holds on to private names of libraries.
VERSION_TESTS := tests/unit/meta \
	$(addprefix tests/contract/test_,plan_traces_the_step.py plan_fake_cuda.py load_architectures.py)

.DEFAULT_GOAL := help
.PHONY: help setup demo check test proof nightly affected durations chaos lint soak bench bench-search gpu gpu-memory clean
.PHONY: site pictures strangers viz regressions published published-compare attack times engines test-nodes wheel-test versions environments mutants cards licenses

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/'

setup: $(STAMP) ## make .venv with every pinned dependency

# torch goes first and by its pin alone: resolved together with the rest, pip may take a build of several gigabytes.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dryfit needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,demo,dev]'
	touch $@

$(SITE_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[site]'
	touch $@

site: $(SITE_STAMP) ## build docs/ and the reference into build/site, half a minute; a dead link or a page without a place fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build  # with --quiet it does not count warnings

pictures: $(SITE_STAMP) ## take the pictures of docs/pictures anew, from real runs: a minute
	$(TEST_ENV) $(BIN)/python scripts/pictures.py

engines: ## install the programs that tests run, as Debian packages: as root, or by sudo
	@$(PYTHON) scripts/engines.py

demo: $(STAMP) ## search hyperparameters of a small encoder on synthetic posts; runs again where it stopped
	test -e demo/study.toml || $(BIN)/dryfit init demo
	HF_HUB_OFFLINE=1 $(BIN)/dryfit tune demo/study.toml

check: $(STAMP) ## the tests that need no torch, a minute on two cores
	$(PYTEST) --light -m '$(QUICK) and not heavy'

test: $(STAMP) ## unit, property, contract and chaos tests, about six minutes on two cores
	$(PYTEST) -m '$(QUICK)'

proof: $(STAMP) ## the tests that take longer, about eleven minutes on two cores
	$(PYTEST) --long -m 'slow and not nightly and $(NEVER)'

test-nodes: $(STAMP) ## studies on real engines, several nodes on this machine, some of which die: a few minutes
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile tests/nodes -m nodes

nightly: $(STAMP) ## every member of every product, all drawn examples, each process from nothing: hours
	DRYFIT_FULL=1 DRYFIT_COLD=1 $(PYTEST) -m '$(NEVER)'

affected: $(STAMP) ## of `make test`, the files that what has changed since BASE (a commit; HEAD) reaches
	@files=$$($(BIN)/python tests/support/reach.py $(BASE)) || exit 1; \
	if [ -z "$$files" ]; then echo 'no test reaches what has changed since $(BASE)'; exit 0; fi; \
	$(PYTEST) -m '$(QUICK)' $$files

durations: $(STAMP) ## write tests/durations.json: measured now, or with TIMES=FILE by an earlier run (.ci/run: build/test-times)
ifneq ($(origin TIMES),command line)
	rm -f $(TIMES); mkdir -p build
	DRYFIT_TEST_TIMES=$(CURDIR)/$(TIMES) $(PYTEST) -m 'not nightly and $(NEVER)'
	rm -f tests/durations.json
endif
	$(BIN)/python tests/support/durations.py write $(TIMES)

times: $(STAMP) ## fail where a test file took more than 3 s in the last run of .ci/run and tests/durations.json does not know it
	$(BIN)/python tests/support/durations.py check $(TIMES)

chaos: $(STAMP) ## real faults and the long storms of kills (long); CHAOS_SEED=N repeats a storm
	$(TEST_ENV) $(BIN)/python -m pytest tests/chaos -m 'not gpu'

lint: $(STAMP) ## ruff, pyright and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff check --isolated --target-version py310 --select E9,F src/dryfit/gpu src/dryfit/settings/re*.py
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

wheel-test: $(STAMP) ## build wheel and sdist, install the wheel with its extras in a new environment, and use it
	$(BIN)/python scripts/wheel_test.py

versions: $(STAMP) ## tests on the lowest and highest versions allowed, on each Python; gigabytes, one run at a time
	$(TEST_ENV) $(BIN)/python scripts/versions.py $(VERSION_TESTS)

environments: $(STAMP) ## rehearse seven programs in environments of other versions, and write docs/environments.md; gigabytes, one at a time
	$(TEST_ENV) $(BIN)/python scripts/environments.py

cards: $(STAMP) ## plan which model fits which card, and write the table into docs/cards.md; half an hour
	$(TEST_ENV) $(BIN)/python scripts/card_table.py

licenses: $(STAMP) ## install every extra in a temporary environment, and write docs/licenses.md from its metadata; minutes
	$(BIN)/python scripts/licenses.py

strangers: $(STAMP) ## rehearse strangers' scripts that are checked out in DIR, all or ROWS=a,b, and write docs/strangers.md; hours, goes on
	@test -n '$(DIR)' || { echo 'make strangers DIR=FOLDER: the folder of the checkouts' >&2; exit 2; }
	$(TEST_ENV) $(BIN)/python benchmarks/strangers/strangers.py '$(DIR)' --rows '$(ROWS)'

viz: $(STAMP) ## look at memory snapshots in PyTorch's own viewer, by a headless Chromium; VIZ: a folder of MemoryViz.js and d3
	@test -f '$(VIZ)/MemoryViz.js' || { echo 'make viz VIZ=FOLDER: torch/utils/viz of PyTorch, with npm install d3@7' >&2; exit 2; }
	VIZ='$(abspath $(VIZ))' $(PYTEST) -m 'not nightly' tests/contract/test_viewers.py

regressions: $(STAMP) ## replay public changes that cost GPU memory through dryfit check, in OUT; PEFT=CHECKOUT: quiet commits too
	@test -n '$(OUT)' || { echo 'make regressions OUT=FOLDER: where packages are installed' >&2; exit 2; }
	$(TEST_ENV) $(BIN)/python benchmarks/regressions/regressions.py '$(OUT)' $(if $(PEFT),--peft '$(PEFT)')

published: $(STAMP) ## rehearse the scripts of PEFT=, TIMM= (git repositories) whose memory others measured; hours, goes on; in OUT
	@test -n '$(OUT)' || { echo 'make published OUT=FOLDER PEFT=... TIMM=...: folders of inputs and of the repositories' >&2; exit 2; }
	PEFT='$(PEFT)' TIMM='$(TIMM)' $(BIN)/python benchmarks/published/published_run.py '$(OUT)' --rows '$(ROWS)'

published-compare: $(STAMP) ## hold committed predictions against what others measured, and write the table of docs/accuracy.md
	$(BIN)/python benchmarks/published/compare.py

mutants: $(STAMP) ## change ten modules a little, 8 times each: what the night's tests notice, the daily ones must
	$(TEST_ENV) $(BIN)/python scripts/mutants.py

attack: $(STAMP) ## hostile folders, ledgers, surroundings and signals at random for ten minutes: no promise may break
	$(TEST_ENV) PYTHONPATH=src:tests/support $(BIN)/python tests/support/attacker.py $(ATTACK)

soak: $(STAMP) ## 5 000 tiny trials in one run: nothing may grow; 10 to 30 minutes on two cores, prints a table
	$(TEST_ENV) $(BIN)/python benchmarks/soak.py

bench: $(STAMP) ## print the measured numbers that docs/benchmarks.md keeps
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done

bench-search: $(STAMP) ## whole searches by Optuna, Ray Tune and dryfit, hours; goes on where it stopped (folder bench-search)
	$(BIN)/python benchmarks/bench_alternatives.py --trials 24 --seeds 3 --rows 800 --arms a,b,c,d --out bench-search

gpu: $(STAMP) ## the tests that need a CUDA device
	$(TEST_ENV) $(BIN)/python -m pytest tests/gpu -m gpu

gpu-memory: $(STAMP) ## hold plans against a CUDA device, 75 configurations; goes on where it stopped
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gpu_memory.py --out gpu-memory

clean: ## remove .venv, the demo and all caches
	rm -rf $(VENV) demo gpu-memory bench-search build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
