# Every step runs in the interpreter that scripts/python finds or builds; see there.
.NOTPARALLEL:
.PHONY: help demo test lint nightly mutants sanitize matrix clean

WORKERS ?= 2
EXAMPLES ?= 20000
PARTS ?= 8
PACKAGE_NEEDS = msgspec numpy triton typer rich
TEST_NEEDS = $(PACKAGE_NEEDS) pytest xdist pytest_timeout hypothesis matplotlib safetensors transformers

help:
	@echo "make demo    recorded steps: inputs, bytes verified, time and GB/s on this machine"
	@echo "make test    lint, then the tests (WORKERS=2 processes; ARGS='-k name' goes to pytest)"
	@echo "make lint    ruff, ruff format, mypy"
	@echo "make nightly    EXAMPLES=20000 random calls, split evenly over the properties and rounded up: docs/nightly.md"
	@echo "make mutants    break the library on purpose, and see that a test notices: docs/mutants.md"
	@echo "make sanitize   one pass over the cases on a GPU under each tool of compute-sanitizer: docs/sanitize.md"
	@echo "make matrix     a selection of the tests with the oldest and the newest torch and Triton, installed under build/"
	@echo "make clean   remove .venv, build products and caches"
	@echo "scripts/python ARGUMENTS   the interpreter that these use"

demo:
	scripts/python --need "$(PACKAGE_NEEDS)" -c 'import sys; from preattn.cli import main; sys.exit(main())' demo

test: lint
	scripts/python --need "$(TEST_NEEDS)" -m pytest -n $(WORKERS) $(ARGS)

lint:
	scripts/python --skip-without ruff -m ruff check .
	scripts/python --skip-without ruff -m ruff format --check .
	scripts/python --skip-without mypy -m mypy

nightly:
	OMP_NUM_THREADS=1 PREATTN_EXAMPLES=$(EXAMPLES) PREATTN_PARTS=$(PARTS) PREATTN_COUNTS=docs/nightly.md \
		scripts/python --need "$(TEST_NEEDS)" -m pytest -n $(WORKERS) --dist worksteal --timeout 0 \
		tests/test_properties.py $(ARGS)

mutants:
	scripts/python --need "$(TEST_NEEDS)" scripts/mutants.py $(ARGS)

sanitize:
	scripts/python --need "$(PACKAGE_NEEDS)" scripts/sanitize.py $(ARGS)

matrix:
	scripts/python scripts/matrix.py --workers $(WORKERS) $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find preattn tests -name __pycache__ -type d -prune -exec rm -rf {} +
