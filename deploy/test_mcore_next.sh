#!/usr/bin/env bash
# `make test-mcore-next`: the learner's tests on the newest megatron-core that Forebay knows, in an environment of its own: .venv
# has the oldest. Run from the checkout's root; arguments go to pytest. vLLM is not needed, so it is not there.
#
# megatron-core 0.17 and later need Python 3.12: the one that PYTHON312 names, else python3.12 of the PATH.
set -euo pipefail

PYTHON=${PYTHON312:-python3.12}
VENV=.venv-mcore-next
MEGATRON=0.19.2
TORCH=2.13.0

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
fail() { printf 'test-mcore-next: %s\n' "$*" >&2; exit 1; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null \
  || fail "Python 3.12 or newer is needed, and $PYTHON is not there or older. Name one with PYTHON312=..."

STAMP=$VENV/.forebay-setup
WANT=$(cat pyproject.toml deploy/test_mcore_next.sh deploy/constraints.txt | sha256sum | cut -d' ' -f1)
if ! { [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$WANT" ]; }; then
  [ -x $VENV/bin/python ] || "$PYTHON" -m venv $VENV || fail "the venv module is missing: apt-get install python3.12-venv"
  PIP="$VENV/bin/python -m pip --disable-pip-version-check"
  say "Installing megatron-core $MEGATRON and torch $TORCH on $("$PYTHON" --version) (a few minutes, some GB)"
  $PIP install -qq --upgrade 'pip>=25.1'
  # What was tested together with the older one, but for itself and what torch brings for another Python.
  grep -vE '^(megatron-core|triton)==' deploy/constraints.txt > $VENV/constraints.txt
  $PIP install -qq -c $VENV/constraints.txt "torch==$TORCH" "megatron-core==$MEGATRON" 'transformers>=5,<5.20' \
    'safetensors>=0.6,<1' --group dev -e .
  echo "$WANT" > "$STAMP"
fi

say "$($VENV/bin/python -c 'import torch, megatron.core as m; print("megatron-core", m.__version__, "torch", torch.__version__)' 2> /dev/null)"
CUDA_VISIBLE_DEVICES='' exec $VENV/bin/python -m pytest -m "not gpu" tests/unit/test_learner_*.py tests/integration/test_megatron_*.py "$@"
