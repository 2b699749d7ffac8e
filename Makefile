# Every target sets up .venv first, once: again only when the files that say what to install change.

PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
INSTALLED := .venv/.installed
# Each holds up to 3 GB and waits for a sixth of its time; a file's tests stay in one. The longest come first, by
# tests/durations.txt, which `make test ARGS=--write-durations` writes again.
IN_MEMORY := $(shell awk '/^MemTotal/ {print ($$2 < 12 * 2 ^ 20) ? 2 : 3}' /proc/meminfo 2>/dev/null || echo 2)
TEST_PROCESSES ?= $(if $(filter 1 2 3,$(shell nproc)),$(IN_MEMORY),4)
TEST_OPTIONS := -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
PIP_INSTALL := $(VENV_PYTHON) -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install train test test-fast test-slow test-clusters saved-runs browser lint format docs clean

help: ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12
	@echo 'ARGS="..." is handed on to train, the tests and the guides; PYTHON=... names the Python of a new .venv.'

install: $(INSTALLED) ## set up .venv: . .venv/bin/activate finds the commands then

train: $(INSTALLED) ## train the reference CNN on the bundled digits, or resume that run
	@$(VENV_PYTHON) -m crankshaft train --model=cnn --input=digits --train_epochs=10 --run_dir=runs/first $(ARGS)

test: $(INSTALLED) ## run the tests, but for the slow ones
	@$(VENV_PYTHON) -m pytest -q -m "not slow and not clusters" $(TEST_OPTIONS) $(ARGS)

test-fast: $(INSTALLED) ## run the tests that start no process and build no whole run: for every save
	@$(VENV_PYTHON) -m pytest -q -m "fast and not slow and not clusters" $(TEST_OPTIONS) $(ARGS)

test-slow: $(INSTALLED) ## run the slow tests
	@$(VENV_PYTHON) -m pytest -q -m slow $(TEST_OPTIONS) $(ARGS)

test-clusters: $(INSTALLED) ## run the tests by Slurm, podman and Ray, which this installs as the script that is printed says
	@cat tests/clusters/install.sh
	@tests/clusters/install.sh $(VENV_PYTHON)
	@$(VENV_PYTHON) -m pytest -q -m "not slow" tests/clusters $(ARGS)

saved-runs: $(INSTALLED) ## write again the run_dirs that tests resume, after a deliberate change of what a run saves
	@$(VENV_PYTHON) -m tests.launch.saved_runs.write $(ARGS)

browser: ## install the Chromium that tests of the page open, where there is none, by Debian's packages (as root)
	@command -v chromium chromium-browser google-chrome >/dev/null || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }

lint: $(INSTALLED) ## check style and format by ruff, types by mypy, workflows against their schema
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .
	@$(VENV_PYTHON) -m mypy
	@$(VENV_PYTHON) -m check_jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml

format: $(INSTALLED) ## mend what ruff can mend
	@$(VENV_PYTHON) -m ruff check --fix .
	@$(VENV_PYTHON) -m ruff format .

# The theme says at each build what will follow it one day.
docs: $(INSTALLED) ## build the guides as a site into site/, by MkDocs; a broken link is an error
	@$(VENV_PYTHON) docs/make_pages.py
	@NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict -q $(ARGS)

clean: ## remove caches and build outputs; .venv and runs stay
	@rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	@find . \( -path ./.git -o -path ./.venv -o -path ./runs \) -prune -o \
		-type d -name __pycache__ -prune -exec rm -rf {} +

# The stamp is written last, so an install that was interrupted is taken up again. Setuptools comes
# first and builds without isolation, or its version would be the newest of the day.
$(INSTALLED): setup.cfg constraints.txt pyproject.toml
	@rm -f $@
	@$(VENV_PYTHON) -m pip --version >/dev/null 2>&1 || { $(CREATE_VENV); }
	@echo 'Installing into .venv (the first time TensorFlow is some 600 MB to download) ...'
	@$(PIP_INSTALL) setuptools
	@$(PIP_INSTALL) --no-build-isolation -e '.[test,examples,docs,array-record,monitor,parquet,text,tfrecord]'
	@touch $@

define CHECK_PYTHON
import sys; \
found = "%d.%d.%d" % sys.version_info[:3]; \
(3, 10) <= sys.version_info[:2] <= (3, 13) or sys.exit( \
"$(PYTHON) is Python " + found + "; TensorFlow 2.21 needs 3.10 to 3.13: make PYTHON=python3.12")
endef

define CREATE_VENV
command -v '$(PYTHON)' >/dev/null || { \
	echo '$(PYTHON) is not found; install Python 3.10 to 3.13, or name one: make PYTHON=python3.12' >&2; \
	exit 1; }; \
$(PYTHON) -c '$(CHECK_PYTHON)' || exit 1; \
$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	echo '$(PYTHON) has no venv; install it (Debian, Ubuntu: apt install python3-venv)' >&2; \
	exit 1; }; \
echo "Making .venv with $$($(PYTHON) --version) ..."; \
$(PYTHON) -m venv --clear .venv
endef
