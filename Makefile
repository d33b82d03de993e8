# Everything runs in a virtual environment of its own, .venv. A torch that $(PYTHON) already has is used as it is.
# Without one, or if you name one, it is installed into .venv:  make test TORCH=torch==2.13.0

PYTHON ?= python3
TORCH ?= torch
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
GATE_ARGS ?=
GPU_RECORD ?= docs/gpu-record.json
PYTEST_ARGS ?=
# Threads that wait for work sleep: spinning ones starve whatever else the cores do.
export OMP_WAIT_POLICY ?= PASSIVE

# Made anew when pyproject.toml changes, and when TORCH does.
READY := $(VENV)/ready-$(shell echo '$(TORCH)' | cksum | cut -d ' ' -f 1)

# The oldest Triton that the kernels support, for the gate that compiles them on it. Triton exists for Linux only.
TRITON36_PYTHON := .venv-triton36/bin/python
ifeq ($(shell uname -s),Linux)
TRITON36 := .venv-triton36/ready
endif

# The second of torchtitan's release lines; .venv has the first, 0.2.x.
TITAN03_PYTHON := .venv-titan03/bin/python
TITAN03 := .venv-titan03/ready
TITAN_TESTS := tests/integrations/torchtitan
# The last torchao whose MX linear layers torchtitan 0.2.2 knows; apart, for peft in .venv wants another one or none.
TORCHAO := $(VENV)/torchao-0.15

.DEFAULT_GOAL := help
.PHONY: help demo test test-full gpu-test memcheck gate lint clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY)  ## train a small Llama and generate a small video, in bf16 and in low bits -> demo-report/report.md
	$(BIN)/lowbit-attn demo $(DEMO_ARGS)

test: $(READY) $(TRITON36) $(TITAN03) $(TORCHAO)  ## run the tests, those of torchtitan with both of its release lines
	$(BIN)/python -m pytest -n 2 -m "not full" $(PYTEST_ARGS)
	$(TITAN03_PYTHON) -m pytest -n 2 -m "not full" $(TITAN_TESTS)
	PYTHONPATH=$(TORCHAO) $(BIN)/python -m pytest $(TITAN_TESTS)/test_titan_torchao_v02.py

test-full: $(READY) $(TRITON36) $(TITAN03) $(TORCHAO)  ## run the tests and the long sweeps
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)
	$(TITAN03_PYTHON) -m pytest -n 2 $(TITAN_TESTS)
	PYTHONPATH=$(TORCHAO) $(BIN)/python -m pytest $(TITAN_TESTS)/test_titan_torchao_v02.py

gpu-test: $(READY)  ## run the tests that need a GPU, and record kernels and outcomes in docs/gpu-record.json
	LOWBIT_ATTN_GPU_RECORD=$(GPU_RECORD) $(BIN)/python -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

memcheck: $(READY)  ## run small calls of the Hopper kernels under compute-sanitizer, which needs a GPU
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python tests/gpu/memcheck.py

gate: $(READY) $(TRITON36)  ## compile every Hopper and portable kernel without a GPU; GATE_ARGS=--record accepts their sizes
	$(BIN)/python tests/gates/compile_kernels.py $(GATE_ARGS)
	$(TRITON36_PYTHON) tests/gates/compile_kernels.py $(GATE_ARGS)
	$(BIN)/python tests/gates/portable.py $(GATE_ARGS)
	$(TRITON36_PYTHON) tests/gates/portable.py $(GATE_ARGS)

lint: $(READY)  ## check style and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy lowbit_attn

clean:  ## remove the environment and everything that was generated
	rm -rf $(VENV) .venv-triton36 .venv-titan03 demo-report build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Prints where a torch of at least 2.11 is installed, if one is. A .pth file then shows that folder to .venv, which also works
# when $(PYTHON) is itself in a virtual environment; pip installs nothing outside .venv.
define FIND_TORCH
import pathlib, re
try:
    import torch
except Exception:
    raise SystemExit
public = torch.__version__.split("+")[0]
release = tuple(int(part) for part in re.findall(r"\d+", public)[:2])
if release > (2, 11) or (release == (2, 11) and not re.search("a|b|rc|dev", public)):
    print(pathlib.Path(torch.__file__).resolve().parents[1])
endef
export FIND_TORCH

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "lowbit-attn needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
ifeq ($(origin TORCH),file)
	@folder=$$($(PYTHON) -c "$$FIND_TORCH") && if [ -n "$$folder" ]; then \
		echo "using the torch in $$folder"; \
		echo "$$folder" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed-torch.pth"; fi
endif
	$(BIN)/python -m pip install $(TORCH)
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(VENV)/torch.txt
	$(BIN)/python -m pip install --constraint $(VENV)/torch.txt --config-settings editable_mode=compat --editable '.[demo,dev]'
	@rm -f $(VENV)/ready-* && touch $@

# Triton 3.6 alone; torch and the rest are borrowed from .venv, where they stand behind it on the path.
define BORROW
import pathlib, sysconfig, torch
print(sysconfig.get_path("purelib"), pathlib.Path(torch.__file__).resolve().parents[1], sep="\n")
endef
export BORROW

.venv-triton36/ready: $(READY)
	$(PYTHON) -m venv .venv-triton36
	$(TRITON36_PYTHON) -m pip install --no-deps triton==3.6.0
	@$(BIN)/python -c "$$BORROW" > "$$($(TRITON36_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
	@touch $@

# torchtitan 0.3 and what it needs beyond .venv's packages, which are borrowed in the same way.
.venv-titan03/ready: $(READY)
	$(PYTHON) -m venv .venv-titan03
	$(TITAN03_PYTHON) -m pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing torchao==0.18.0
	@$(BIN)/python -c "$$BORROW" > "$$($(TITAN03_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
	@touch $@

$(TORCHAO): $(READY)
	$(BIN)/python -m pip install --no-deps --target $@ torchao==0.15.0
	@touch $@
