# Every target sets up what it needs: Python 3.10 or newer, make and this clone are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WARM := $(VENV)/.warm
# Python compiles the few modules that are imported and must be allowed to keep them: pip would compile every module of every package.
INSTALL := bin/python -m pip install --quiet --disable-pip-version-check --no-compile
PIP := $(VENV)/$(INSTALL) -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo docs test slow mutants interop versions lint dist pytest clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## does a larger batch buy back bits? a study with figures, in about a minute
	$(BIN)/qsim study batch-size --designs steps --seeds 4

docs: $(READY) ## the documentation site, in docs/_build/html; a warning is an error
	$(BIN)/sphinx-build -q -W --keep-going -n -b html docs docs/_build/html
	$(BIN)/python tests/support/site_search.py docs/_build/html
	$(BIN)/python tests/support/site_weights.py docs/_build/html

# All at once: the tests leave a part of the processors idle.
test: $(READY) ## lint, the site, the distribution, every example in a docstring, all code on the site, and all tests but the slow ones
	@$(MAKE) --no-print-directory -j4 lint docs dist pytest && echo "lint, docs, dist and tests passed"

TEST := bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal
TESTS := $(VENV)/$(TEST)

pytest: $(WARM)
	$(TESTS) -m "not slow"

slow: $(WARM) ## the slow tests: examples, reduced studies, whole models compiled, every kernel compiled for a GPU
	$(TESTS) -m slow

mutants: $(READY) ## plant the faults of tests/mutants, one at a time, and list those that no test of `make test` sees
	$(BIN)/python tests/support/mutants.py

# Of other packages, tests use what is installed; here, all must be.
interop: $(READY) ## all tests, with every package and program that any of them uses: a missing one is a failure
	$(PIP) --no-build-isolation -e '.[dev,docs,interop]'
	$(TESTS) --no-missing

# The oldest release of torch that setup.cfg allows, the newest that was tested, and two between, each with its triton.
RELEASES := 2.9.1+3.5.1 2.11.0+3.6.0 2.13.0+3.7.1 2.15.0+3.7.1
OTHERS := $(RELEASES:%=$(VENV)/torch-%)
FOLDERS := functional nn optim points random recipes

versions: $(OTHERS:%=%/.ready) ## the fast tests of layers, optimizers and recipes on four releases of torch, and a table of the results
	for other in $(OTHERS); do $$other/$(TEST) -m "not slow" --junitxml=$$other/tests.xml $(FOLDERS:%=tests/%) || true; done
	$(PYTHON) tests/project/versions.py $(OTHERS:%=%/tests.xml)

# An environment with another torch; everything else has the tested version.
$(VENV)/torch-%/.ready: setup.cfg constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -v -e '^torch==' -e '^triton==' constraints.txt > $(@D)/constraints.txt
	printf '%s\n' $(subst +, triton==,torch==$*) >> $(@D)/constraints.txt
	$(@D)/$(INSTALL) -c $(@D)/constraints.txt setuptools wheel
	$(@D)/$(INSTALL) -c $(@D)/constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

# One process compiles to bytecode what tests import; in the first run, all would do so at the same time. Errors are left to the tests.
$(WARM): $(READY)
	@$(BIN)/python -m pytest --collect-only --quiet > /dev/null 2>&1 || true
	@touch $@

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# From the local index only: no setting of pip's and no other index has a say.
FROM_INDEX := --quiet --isolated --disable-pip-version-check --no-compile --no-deps --no-cache-dir --index-url file://$(CURDIR)/build/index

# The environment in build/ has what the wheel asks for and nothing else, linked instead of installed a second time; `-I` keeps this folder
# out of its reach.
dist: $(READY) ## sdist and wheel, in dist/: built, checked, and tried as installed from an index
	rm -rf dist build
	$(BIN)/python -m build --no-isolation --outdir dist . > /dev/null
	$(BIN)/python tests/project/distribution.py dist
	$(PYTHON) -m venv --without-pip build/installed
	$(BIN)/python tests/project/link_requirements.py dist/*.whl build/installed/lib/python*/site-packages
	$(BIN)/python tests/project/simple_index.py dist build/index
	build/installed/bin/python -m pip install $(FROM_INDEX) qsim-torch
	$(BIN)/python -m pip install $(FROM_INDEX) --no-binary qsim-torch --no-build-isolation --target build/sdist qsim-torch
	for name in qsim qsim_kernels; do diff -r build/sdist/$$name build/installed/lib/python*/site-packages/$$name; done
	build/installed/bin/python -m pip check --disable-pip-version-check
	build/installed/bin/python -I tests/project/installed.py
	cp tests/project/downstream.py build && cd build && ../$(BIN)/mypy --config-file= --strict --python-executable installed/bin/python downstream.py
	rm -rf build

clean: ## remove the virtual environment and everything that tools have left behind
	rm -rf $(VENV) build dist docs/_build docs/_drawn *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp makes a second call instant. The build tools come first, at the tested versions, so that pip need not fetch its own.
$(READY): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit("qsim needs Python 3.10 or newer, $(PYTHON) is %d.%d: make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel
	$(PIP) --no-build-isolation -e '.[dev,docs]'
	@touch $@
