# What people run. Each command sets up .venv first if it is missing or older than the pins: meshloom and what it needs;
# tests add their tools, those of the docs site and the libraries around a model.
#   make PYTHON=python3.11 demo    another interpreter
#   make JOBS=8 test               more test processes
#   make SEED=17 soak              the cases of an earlier long run again

PYTHON ?= python3
JOBS ?= 4
# Tests start hundreds of processes: sources are compiled once, also where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=
CASES ?= 100000

# What `make check` runs: tests of the parts that most changes touch, a minute in all. A test looks for these files.
QUICK := algebra arranging autograd checklist_page docs errors hotpath indexing mesh observe paths placement \
    private redistribution repository rooms stubs surface

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTED := $(VENV)/.installed-for-tests
DOCUMENTED := $(VENV)/.installed-for-docs
FAST := $(VENV)/.installed-for-speed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
BROWSERS := chromium chromium-browser google-chrome chrome

.PHONY: help demo check test full docs browser bench soak clean

help: ## list the commands
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' $(MAKEFILE_LIST) | while IFS='	' read -r name says; do \
	    printf 'make %-7s %s\n' "$$name" "$$says"; done

demo: $(STAMP) ## train a small Llama on 8 devices: plan, dry run, training, checkpoints, a sample
	@$(BIN)/python examples/train_llama.py --checkpoints .demo

check: $(TESTED) ## lint, types and the quick tests: two minutes, for daily work
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m 'not slow' $(foreach each,$(QUICK),$(shell find tests -name test_$(each).py))

# Where CI is set, tests that need a browser fail without one.
test: $(TESTED) $(if $(CI),browser) ## lint, types, doctests and tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder --doctest-modules src/meshloom tests

# The long runs draw new cases each time and print their seed; with SEED they draw the same again.
full: test ## make test, then the long runs that do not fit into it: more than an hour
	@MESHLOOM_AUTOPLAN=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/nn/test_autoplan_exhaustive.py
	@MESHLOOM_MODELS=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/nn/test_models.py tests/nn/test_pipeline.py tests/processes/test_weights.py
	@MESHLOOM_CARDS=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/ops/test_property_cards.py
	@MESHLOOM_CASES=2000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/controller/test_controller.py -k equal_dense
	@$(MAKE) --no-print-directory soak CASES=20000 SEED=$(SEED)

docs: $(DOCUMENTED) ## build the docs site into site/, strictly
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html, or with search: $(BIN)/python -m http.server --directory site"

browser: ## install Debian's Chromium for the tests that look at pages, unless a browser is there
	@for each in $(BROWSERS); do command -v $$each >/dev/null && exit 0; done; \
	    $(SUDO) apt-get update -qq && $(SUDO) apt-get install -qq -y --no-install-recommends chromium

bench: $(FAST) ## measure against dense torch, DTensor and (with the bench extra) JAX and Ray
	@$(BIN)/python benchmarks/run.py

soak: $(TESTED) ## CASES calls of ops and CASES programs (100000) from a new SEED, and torch's databases whole
	@MESHLOOM_CASES=$(CASES) $(if $(SEED),MESHLOOM_SEED=$(SEED)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) \
	    tests/tensor/test_programs.py tests/ops/test_property.py tests/ops/test_op_db.py tests/ops/test_module_db.py \
	    tests/checkpoint/test_checkpoint_matrix.py

clean: ## remove the environment, caches and build output
	rm -rf $(VENV) .demo build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes in alone and pinned, before anything that asks for a range of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "meshloom needs Python 3.10 or newer; try: make PYTHON=python3.11"; exit 1; }
	@echo "setting up $(VENV); the first time this takes a minute or more"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) setuptools
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) --no-build-isolation --editable .
	@touch $@

# Thousands of modules that no test imports need no compiling.
$(TESTED): $(STAMP)
	@echo "adding what the tests need; the first time this takes a minute"
	@$(PIP) --no-compile --no-build-isolation --editable '.[test,models,docs,fast,ray]'
	@touch $@ $(DOCUMENTED) $(FAST)

$(DOCUMENTED): $(STAMP)
	@echo "adding what the docs site needs"
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

$(FAST): $(STAMP)
	@echo "adding what makes block floats fast"
	@$(PIP) --no-build-isolation --editable '.[fast]'
	@touch $@
