# make install     a virtual environment .venv with the tested versions
# make quickstart  a toy model, trained with and without balancing, on this machine's CPU
# make test        everything that must hold before a commit: lint, types, all tests, kernels interpreted and compiled
# make test-fast   the tests without the slow ones
# make test-kernels     the Triton kernels' values, interpreted on the CPU
# make kernels-compile  the Triton kernels for five GPU architectures: registers, spills, shared memory (no GPU needed)
# make lint        lint, format and types only
# make format      let ruff put the files in order
# make clean       remove .venv, caches and builds; runs/ stays

PYTHON ?= python3
BIN := .venv/bin
PURE := batching density devices epoch errors ladder latency latency_profile optimal pipeline_schedule placement planner prediction_error rivals runlog schedule simulation sparsity_aware tuning workloads

.PHONY: install quickstart test test-fast test-kernels kernels-compile lint format clean

install: .venv/.installed

# torch comes first and pinned: a torch that the resolver may choose anew brings gigabytes of CUDA along.
.venv/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -c constraints.txt -e ".[test,dev]"
	touch $@

quickstart: install
	$(BIN)/python recipes/quickstart.py

test: lint test-kernels
	$(BIN)/python -m pytest
	$(BIN)/python evaluation/compile_kernels.py --sample

test-fast: install
	$(BIN)/python -m pytest -m "not slow"

# A process of its own: Triton decides when a kernel is decorated whether it is interpreted or compiled.
test-kernels: install
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/triton_backend

kernels-compile: install
	$(BIN)/python evaluation/compile_kernels.py

# Only the pure modules are typed strictly; a planned one that is not there yet is passed over.
lint: install
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy $(wildcard $(PURE:%=hf_sparsebalance/%.py))

format: install
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
