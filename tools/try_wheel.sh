#!/usr/bin/env bash
# A new user's first steps with a wheel: in a new environment, in a folder of their own, on a CPU.
set -euo pipefail
wheel=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
unset PYTHONPATH
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # a package and perhaps an option
venv/bin/python -m pip install -q ${TORCH:-torch==2.13.0}
venv/bin/python -m pip install -q ${CONSTRAINTS:+-c "$CONSTRAINTS"} "$wheel"
PATH=$folder/venv/bin:$PATH

python -m pip check
tune ls | grep "^raft_rocm  *cpu_pocket_raft  *cpu  *pocket  *under 1 GiB$" >/dev/null  # not -q: `tune` would write to a closed pipe
rocm-ext doctor || test $? -lt 2
rocm-ext pocket demo/pocket --accuracy 0.1
tune run lora_finetune_rocm --config cpu_pocket epochs=1 max_steps_per_epoch=3
tune run raft_rocm --config cpu_pocket_raft cycles=1 prompts_per_cycle=16 "eval_prompts.split=train[:16]"
rocm-ext report demo/sft demo/raft --output demo/report.html
test -s demo/sft/adapter/adapter_model.safetensors
test -s demo/raft/adapter/adapter_model.safetensors
test -s demo/report.html
echo "the wheel works: $(basename "$wheel")"
