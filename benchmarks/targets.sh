#!/usr/bin/env bash
# The speed targets beside the headline, one bench after the other: three gate rows, fp16, TF32, float32
# and smaller shapes. Raw JSON and a log each in OUT.
#
#   bash benchmarks/targets.sh OUT [PYTHON] [ARGS OF bench...]
set -uo pipefail
out=${1:?usage: benchmarks/targets.sh OUT [PYTHON] [ARGS]} python=${2:-python3}
shift "$(($# < 2 ? $# : 2))"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$out" && out=$(cd "$out" && pwd) && cd "$root" || exit 2
export PYTHONUNBUFFERED=1 PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
failed=0

bench() { # NAME ARGS...
  timeout 120 "$python" -m megafuse bench --json "$out/$1.json" --rivals eager,products \
    "${@:2}" > "$out/$1.log" 2>&1 || { failed=1; echo FAILED >> "$out/$1.log"; }
  echo "== $1" && grep -E "eager|megafuse|products|FAILED" "$out/$1.log" | head -n 4
}
bench k3-bf16 --shape 1024,64,1280,3 "$@"
bench k2-fp16 --dtype fp16 "$@"
bench k2-tf32 --dtype fp32 --tf32 "$@"
bench k2-fp32 --dtype fp32 "$@"
bench b256-bf16 --shape 256,64,1280,2 "$@"
bench t16-bf16 --shape 1024,16,512,2 "$@"
exit "$failed"
