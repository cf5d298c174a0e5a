# Two commands are enough for a newcomer: `make demo` and `make test`. Each sets up .venv first.

PYTHON_BIN := .venv/bin/python
JOBS ?= 2

# Bytecode is kept wherever this runs: dozens of tests start processes that import torch, and
# compiling its modules again costs each of them three seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test distributed check bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    serve the shipped model and send it 34 requests at once"
	@echo "make test    run the tests (JOBS=2 processes)"
	@echo "make distributed    run the tests of several processes"
	@echo "make check   lint, types, import rules"
	@echo "make bench   measure this machine"
	@echo "make setup   only prepare .venv"
	@echo "make clean   remove .venv and caches"

setup:
	@bash tools/setup.sh

demo: setup
	@$(PYTHON_BIN) examples/demo.py

# One thread per process: two processes share two cores, and results do not depend on the machine.
# Each starts with half of the files, so that what a file prepares is mostly prepared once.
test: setup
	OMP_NUM_THREADS=1 $(PYTHON_BIN) -m pytest -q -n $(JOBS) --dist worksteal $(ARGS)

# Each test starts processes of its own.
distributed: setup
	OMP_NUM_THREADS=1 $(PYTHON_BIN) -m pytest -q -m distributed $(ARGS)

# Formatting is not enforced: tables of numbers and shapes are laid out by hand where it helps.
check: setup
	$(PYTHON_BIN) -m ruff check .
	$(PYTHON_BIN) -m mypy
	.venv/bin/lint-imports --no-cache
	if [ -f tools/lint_rt.py ]; then $(PYTHON_BIN) tools/lint_rt.py; fi

bench: setup
	set -e; for name in first_token concurrency host_work prefix_cache rt_overhead server_overhead; do \
	    echo "$$name" >&2; OMP_NUM_THREADS=1 $(PYTHON_BIN) benchmarks/$$name.py || true; done

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
