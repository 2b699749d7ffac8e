# Every target sets up .venv first, once: again only when the files that say what to install change.

PYTHON ?= python3
# `make versions` names others: an environment, its constraints, and a wheel instead of this folder.
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PACKAGE ?= .
EXTRAS := test,examples,docs,array-record,monitor,parquet,text,tfrecord
VENV_PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# Each holds up to 3 GB and waits for a sixth of its time; a file's tests stay in one. The longest come first, by
# tests/durations.txt, which a run of both tiers writes again: `make test ARGS='-m "not slow and not clusters"
# --write-durations'`.
IN_MEMORY := $(shell awk '/^MemTotal/ {print ($$2 < 12 * 2 ^ 20) ? 2 : 3}' /proc/meminfo 2>/dev/null || echo 2)
TEST_PROCESSES ?= $(if $(filter 1 2 3,$(shell nproc)),$(IN_MEMORY),4)
TEST_OPTIONS := -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
PIP_INSTALL := $(VENV_PYTHON) -m pip install -qq --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install train test test-fast test-rest test-slow test-clusters test-hosts versions upgrades release saved-runs browser lint format docs clean

help: ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12
	@echo 'ARGS="..." is handed on to train, the tests and the guides; PYTHON=... names the Python of a new .venv.'

install: $(INSTALLED) ## set up .venv: . .venv/bin/activate finds the commands then

train: $(INSTALLED) ## train the reference CNN on the bundled digits, or resume that run
	@$(VENV_PYTHON) -m crankshaft train --model=cnn --input=digits --train_epochs=10 --run_dir=runs/first $(ARGS)

test: $(INSTALLED) ## run the fast tests, and of the others the cheapest of all that must hold
	@$(VENV_PYTHON) -m pytest -q -m "not slow and not clusters and (fast or not thorough)" $(TEST_OPTIONS) $(ARGS)

test-fast: $(INSTALLED) ## run the tests that start no process and build no whole run: for every save
	@$(VENV_PYTHON) -m pytest -q -m "fast and not slow and not clusters" $(TEST_OPTIONS) $(ARGS)

test-rest: $(INSTALLED) ## run what `make test` leaves out, but for the slow tests
	@$(VENV_PYTHON) -m pytest -q -m "not slow and not clusters and thorough and not fast" $(TEST_OPTIONS) $(ARGS)

test-slow: $(INSTALLED) ## run the slow tests
	@$(VENV_PYTHON) -m pytest -q -m slow $(TEST_OPTIONS) $(ARGS)

test-clusters: $(INSTALLED) ## run the tests by Slurm, podman and Ray, which this installs as the script that is printed says
	@cat tests/clusters/install.sh
	@tests/clusters/install.sh $(VENV_PYTHON)
	@$(VENV_PYTHON) -m pytest -q -m "not slow" tests/clusters $(ARGS)

test-hosts: $(INSTALLED) ## run jobs on hosts that are made of Linux namespaces (as root), and print what each found
	@$(VENV_PYTHON) -m pytest -q -s tests/hosts $(ARGS)

versions: ## test the oldest and the newest Python, TensorFlow, Keras and NumPy, each in an environment of its own
	@$(PYTHON) tests/versions/run.py $(ARGS)

upgrades: $(INSTALLED) ## continue runs that an earlier commit began: FROM=COMMIT, or the newest tag
	@$(VENV_PYTHON) -m benchmarks.bits --begun-by=$(or $(FROM),$(shell git describe --tags --abbrev=0)) $(ARGS)

release: $(INSTALLED) ## build an sdist and a wheel, and check them in an environment of their own
	@rm -rf build dist
	@$(VENV_PYTHON) -m pip install -qq --disable-pip-version-check build twine
	@$(VENV_PYTHON) -m build -q  # the wheel is made from the sdist
	@$(VENV_PYTHON) -m twine check --strict dist/*
	@$(PYTHON) tests/versions/run.py --quick newest
	@version=$$(sed -n 's/^version = //p' setup.cfg) && ls dist && printf '%s\n' \
	  "Next: date CHANGELOG.md's section, commit; git tag $$version && git push origin main $$version;" \
	  "$(VENV_PYTHON) -m twine upload dist/*; raise the version in setup.cfg and engine/version.py, begin its section."

saved-runs: $(INSTALLED) ## write the run_dirs of this version that tests resume, beside those of earlier ones
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
	@find . \( -path ./.git -o -path ./.venv -o -path ./.versions -o -path ./runs \) -prune -o \
		-type d -name __pycache__ -prune -exec rm -rf {} +

# The stamp is written last, so an install that was interrupted is taken up again. Setuptools comes
# first and builds without isolation, or its version would be the newest of the day. Editors and type checkers can't
# follow its finder, but a .pth file to a folder with a link; and these come before a namespace of the same name.
$(INSTALLED): setup.cfg pyproject.toml $(CONSTRAINTS)
	@rm -f $@
	@$(VENV_PYTHON) -m pip --version >/dev/null 2>&1 || { $(CREATE_VENV); }
	@echo 'Installing into $(VENV) (the first time TensorFlow is some 600 MB to download) ...'
	@$(PIP_INSTALL) setuptools
	@$(PIP_INSTALL) --no-build-isolation $(if $(filter .,$(PACKAGE)),-e) '$(PACKAGE)[$(EXTRAS)]'
	@$(if $(filter .,$(PACKAGE)),mkdir -p $(VENV)/src && ln -sfn '$(CURDIR)' $(VENV)/src/crankshaft)
	@$(if $(filter .,$(PACKAGE)),cd $(VENV)/lib/python*/site-packages && echo ../../../src > crankshaft.pth)
	@touch $@

define CHECK_PYTHON
import sys; \
found = "%d.%d.%d" % sys.version_info[:3]; \
(3, 10) <= sys.version_info[:2] <= (3, 13) or sys.exit( \
"$(PYTHON) is Python " + found + "; TensorFlow needs 3.10 to 3.13: make PYTHON=python3.12")
endef

define CREATE_VENV
command -v '$(PYTHON)' >/dev/null || { \
	echo '$(PYTHON) is not found; install Python 3.10 to 3.13, or name one: make PYTHON=python3.12' >&2; \
	exit 1; }; \
$(PYTHON) -c '$(CHECK_PYTHON)' || exit 1; \
$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	echo '$(PYTHON) has no venv; install it (Debian, Ubuntu: apt install python3-venv)' >&2; \
	exit 1; }; \
echo "Making $(VENV) with $$($(PYTHON) --version) ..."; \
$(PYTHON) -m venv --clear $(VENV)
endef
