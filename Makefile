# Everything runs in a virtual environment of its own, .venv. A torch that $(PYTHON) already has is used as it is.
# Without one, or if you name one, it is installed into .venv:  make test TORCH=torch==2.13.0

PYTHON ?= python3
TORCH ?= torch
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Threads that wait for work sleep: spinning ones starve whatever else the cores do.
export OMP_WAIT_POLICY ?= PASSIVE

# Made anew when pyproject.toml changes, and when TORCH does.
READY := $(VENV)/ready-$(shell echo '$(TORCH)' | cksum | cut -d ' ' -f 1)

.DEFAULT_GOAL := help
.PHONY: help demo test test-full lint clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY)  ## train a small Llama and generate a small video, in bf16 and in low bits -> demo-report/report.md
	$(BIN)/lowbit-attn demo $(DEMO_ARGS)

test: $(READY)  ## run the tests
	$(BIN)/python -m pytest -n 2 -m "not full" $(PYTEST_ARGS)

test-full: $(READY)  ## run the tests and the long sweeps
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

lint: $(READY)  ## check style and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy lowbit_attn

clean:  ## remove the environment and everything that was generated
	rm -rf $(VENV) demo-report build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

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
	$(BIN)/python -m pip install --constraint $(VENV)/torch.txt --editable '.[demo,dev]'
	@rm -f $(VENV)/ready-* && touch $@
