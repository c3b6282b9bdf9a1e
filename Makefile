# Every target does its own set-up: `make demo` and `make test` work on a fresh machine with python3.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
WORKERS ?= 2

.PHONY: demo test meshes lint format types package notebook oracle tpu bench clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[cli,test]"
	touch $@

# Extras are stamped apart, so that `make demo` and `make test` need no more than they use.
$(VENV)/.dev: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

$(VENV)/.oracle: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[oracle]"
	touch $@

demo: $(STAMP)
	$(BIN)/lorajax demo

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -q -m "not oracle and not meshes"

meshes: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -q -m meshes

oracle: $(VENV)/.oracle
	$(BIN)/python -m pytest -q -m oracle

# Compiles every kernel and a whole model step with the real TPU compiler; needs no TPU. libtpu has
# an environment of its own, since JAX looks for a TPU wherever it is installed.
tpu: .venv-tpu/.installed
	JAX_PLATFORMS=cpu .venv-tpu/bin/python -m pytest -n $(WORKERS) -q \
		tests/kernels/test_tpu_compile.py tests/kernels/test_tpu_model_step.py \
		tests/sharding/test_collectives.py

.venv-tpu/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/python -m pip install --quiet --upgrade pip
	.venv-tpu/bin/python -m pip install --quiet --editable ".[test,tpu]"
	touch $@

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Type checkers do not see the package-dir mapping, so an installed copy is checked.
types: $(VENV)/.dev
	rm -rf build/typecheck
	$(BIN)/python -m pip install --quiet --no-deps --target build/typecheck .
	$(BIN)/pyright --pythonpath $(BIN)/python --project pyright.json

package: $(VENV)/.dev
	rm -rf dist && $(BIN)/python -m build --outdir dist . > /dev/null
	$(BIN)/python tests/check_wheel.py dist

notebook: $(VENV)/.dev
	$(BIN)/python notebooks/execute.py

bench: $(STAMP)
	$(BIN)/python benchmarks/step.py

clean:
	rm -rf .venv* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
