# Two commands do everything: `make optimize` and `make test`. Both create the environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: env optimize test lint redteam aiperf-env clean

env: $(STAMP)

# pip takes a CPU build of torch where one is offered; uv then installs the rest without touching it. A torch for GPUs brings
# its Triton. For one for CPUs it lies beside, where tests alone find it and run the skills' kernels by its interpreter: in the
# environment itself it would slow every start of transformers by a second.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check $(TORCH_INDEX) "torch==2.13.0" uv
	$(BIN)/uv pip install -q --python $(BIN)/python -e ".[dev,hta]"
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/uv pip install -q --python $(BIN)/python --no-deps --target $(VENV)/interpreter "triton==3.7.1" || echo "no Triton: kernels go untested"
	touch $@

optimize: env
	$(BIN)/optimize --target tok/s --tp 4 --agent playbook --protocol quick --attempts 4 --budget-minutes 10

lint: env
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n 3 --dist loadfile

# AIPerf pins versions that disagree with ours: an environment of its own, for `optimize bench --aiperf`.
aiperf-env: .venv-aiperf/.installed

.venv-aiperf/.installed: env
	$(BIN)/uv venv -q --allow-existing --python $(BIN)/python .venv-aiperf
	$(BIN)/uv pip install -q --python .venv-aiperf/bin/python aiperf==0.13.0
	touch $@

redteam: env
	$(BIN)/python -m redteam

clean:
	rm -rf runs $(VENV)
