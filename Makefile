# Each target makes .venv when it is missing and installs into it, once, what the target needs.
# Options: PYTHON=python3.12 for another interpreter, ARGS="…" for the program that is run.

PYTHON ?= python3
FLASK ?= flask
ARGS ?=
VENV ?= .venv
RUN := $(VENV)/bin/python -m
NEEDS_demo := PostgreSQL, Redis, gunicorn and Flask: 180 MB, less than a minute
NEEDS_test := 750 MB, some minutes

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: demo test test-the-tests lowest newest lint docs bench faults differential real scale poolers platforms test-ecosystem agents test-browser picture screenshots release-check clean help

demo: $(VENV)/.has-demo  ## break things in a shop with the extension, and in one without: a page to press on
	@$(RUN) laboratory $(ARGS)

# All of them in four processes: most wait for servers and workers to start, die and come back. The folders
# are taken by name, so that many quick files (unit, web) come last and all four end together.
test: $(VENV)/.has-test  ## run the tests, or some: make test ARGS="tests/unit -x"
	@$(RUN) pytest -q $(if $(ARGS),$(ARGS),-n 4 --dist loadfile --no-loadscope-reorder)

test-the-tests: $(VENV)/.has-test  ## break the code on purpose: the tests must notice
	@$(RUN) pytest -q -m of_tests $(if $(ARGS),$(ARGS),-n 4 --dist loadfile --no-loadscope-reorder)

lowest:  ## run the tests with the lowest versions that setup.cfg allows: make lowest PYTHON=python3.10
	@mkdir -p build
	@$(PYTHON) .ci/lowest.py > build/lowest.txt
	@PIP_CONSTRAINT=$(CURDIR)/build/lowest.txt $(MAKE) --no-print-directory build/lowest/.has-test VENV=build/lowest
	@build/lowest/bin/python .ci/works_with.py $(ARGS)

# Before their release, too, and only these: what they need is there by then, so pip leaves it as it is. Where
# the index has no such release, the tests run with what is there.
newest:  ## run them with the newest versions: make newest FLASK=../flask, or FLASK=git+https://…
	@$(MAKE) --no-print-directory build/newest/.has-test VENV=build/newest
	@build/newest/bin/python -m pip install -qq --upgrade --upgrade-strategy eager -e . --group test
	@build/newest/bin/python -m pip install -qq --upgrade --pre $(FLASK) werkzeug sqlalchemy || [ $(FLASK) = flask ]
	@build/newest/bin/python .ci/works_with.py $(ARGS)

lint: $(VENV)/.has-lint  ## check style, format and types
	@$(RUN) ruff check -q --output-format concise
	@$(RUN) ruff format -q --check --diff
	@$(RUN) mypy --no-error-summary

# Markdown is for programs, which want straight quotes: an environment of its own.
docs: $(VENV)/.has-docs  ## build docs/_build/html, pages in Markdown and llms.txt too; a warning is an error
	@$(RUN) sphinx -q -W -n --keep-going docs docs/_build/html
	@$(RUN) sphinx -q -W -a -b markdown -d docs/_build/markdown -D smartquotes=0 docs docs/_build/html

picture: $(VENV)/.has-test  ## play the killed worker in both shops, and draw README's picture of it
	@$(RUN) laboratory.picture

screenshots: $(VENV)/.has-test  ## take the pictures of the console and the dashboard; wants Chromium and Prometheus
	@$(RUN) laboratory.screenshots $(ARGS)

bench: $(VENV)/.has-test  ## measure against the unprotected view
	@$(RUN) bench $(ARGS)

faults: $(VENV)/.has-test  ## crash workers and servers for a minute and check every promise
	@$(RUN) tests.faults $(ARGS)

differential: $(VENV)/.has-test  ## run random views plain and protected, and compare
	@$(RUN) tests.differential $(ARGS)

real: $(VENV)/.has-test  ## run the test suites of other packages with and without it, and compare
	@$(RUN) real $(ARGS)

scale: $(VENV)/.has-test  ## put the shop through the faults of many machines: Patroni, HAProxy and others, installed
	@$(RUN) scale $(ARGS)

poolers: $(VENV)/.has-test  ## test behind PgBouncer and Pgpool-II, which must be installed
	@$(RUN) pytest -q tests/poolers $(ARGS)

# The agents are among them; make agents runs theirs alone.
test-ecosystem:  ## test beside other extensions in their newest releases, and note it in bench/figures/works-with.md
	@mkdir -p build
	@$(MAKE) --no-print-directory build/ecosystem/.has-test VENV=build/ecosystem
	@build/ecosystem/bin/python -m pip install -qq --upgrade -r tests/ecosystem/requirements.txt
	@build/ecosystem/bin/python .ci/extensions.py $(ARGS)

agents:  ## test with agents for tracing and the MCP SDK
	@$(MAKE) --no-print-directory test-ecosystem ARGS="tests/agents $(ARGS)"

# FLASK=flask, as for make newest, is none of its own.
platforms: $(VENV)/.has-test  ## test each platform of bench/figures/works-with.md, or some: make platforms ARGS="PostgreSQL 3.12"
	@FLASK=$(filter-out flask,$(FLASK)) $(VENV)/bin/python .ci/platforms.py $(ARGS)

test-browser: $(VENV)/.has-test $(VENV)/.has-docs  ## test the operator's page, the demo's and the docs in a Chromium, which must be installed
	@$(RUN) pytest -q tests/browser $(ARGS)

release-check:  ## build both artefacts and try all that a release needs: PYTHONS="python3.10 python3.13" make release-check
	@$(PYTHON) .ci/release.py $(ARGS)

clean:  ## remove all that was made here, .venv too
	@rm -rf .venv build dist docs/_build *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -prune -exec rm -rf {} +

help:  ## show this
	@sed -n 's/^\([a-z-]*\):.*  ## /\1	/p' Makefile

# The first pip that knows groups: that of an older Python does not. In a terminal pip shows how far it is.
$(VENV)/.has-%: setup.cfg pyproject.toml | $(VENV)/.made
	@echo "Installing what '$*' needs into $(VENV) (once; $(or $(NEEDS_$*),some minutes at most))"
	@$(RUN) pip install -qq 'pip>=25.1'
	@$(RUN) pip install $(if $(MAKE_TERMOUT),,-qq) -e . --group $*
	@touch $@

# A stamp, not bin/python: that is there before a creation that fails half way.
$(VENV)/.made:
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@
