#!/usr/bin/env bash
# Production shape (B=1024 T=64 D=1280 k=2) unless the options say otherwise. Every option goes to
# rank_mixer_src/bench_rank_mixer.py, run by torchrun in NPROC (default 8) independent workers, EP off.
# WARMUP and NUM_TESTS set the sample counts; --warmup and --num-tests override them. PYTHON names the
# interpreter (default: python, or python3 where there is no python).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-$(command -v python || command -v python3 || echo python)}"
exec "$PYTHON" -m rank_mixer_src.launch \
  --warmup "${WARMUP:-2}" --num-tests "${NUM_TESTS:-3}" "$@"
