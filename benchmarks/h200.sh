#!/usr/bin/env bash
# Everything that is claimed of an H200, in one go of about four minutes on 16 cores:
#
#   bash benchmarks/h200.sh OUT [PYTHON]
#
# Timings run alone; checks and tests, which time nothing, run side by side afterwards. Raw JSON and
# logs land in OUT; a summary is printed last. Exit status 1 when a check or a test failed.
set -uo pipefail
out=${1:?usage: benchmarks/h200.sh OUT [PYTHON]} python=${2:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$out" && out=$(cd "$out" && pwd) && cd "$root" || exit 2
export PYTHONUNBUFFERED=1 PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
failed=0

mega() { timeout "$1" "$python" -m megafuse "${@:2}"; }

timed() { # NAME SECONDS ARGS...: alone on the machine
  mega "$2" "${@:3}" > "$out/$1.log" 2>&1 || { failed=1; echo "$1 FAILED" >> "$out/$1.log"; }
}
timed bench-bf16 120 bench --samples 31 --json "$out/bench-bf16.json"
timed workload 60 workload
timed profile 90 profile --ncu --no-check
timeout 60 "$python" benchmarks/rows.py --json "$out/rows-bf16.json" > "$out/rows.log" 2>&1 || failed=1
timeout 60 "$python" benchmarks/matmul.py --json "$out/matmul.json" > "$out/matmul.log" 2>&1 || failed=1

names=() pids=()
beside() { # NAME SECONDS COMMAND...
  timeout "$2" "${@:3}" > "$out/$1.log" 2>&1 &
  names+=("$1") pids+=($!)
}
for dtype in bf16 fp16 fp32; do
  beside "check-production-$dtype" 120 "$python" -m megafuse check --dtype "$dtype" --seeds 1
  beside "check-public-$dtype" 120 "$python" -m megafuse check --shape 4,16,128,2 --dtype "$dtype"
done
beside tests-block 240 "$python" -m pytest -q tests/gpu/test_block.py -rf --tb=short
beside tests-kernels 240 "$python" -m pytest -q tests/gpu/test_matmul.py tests/tile/test_cuda_launch.py -rf --tb=short
for i in "${!pids[@]}"; do
  if ! wait "${pids[$i]}"; then failed=1; echo "FAILED" >> "$out/${names[$i]}.log"; fi
done

for log in "$out"/*.log; do
  echo "== $(basename "$log" .log)"
  case $log in
    */check-*) grep -E "MISS|PASS|FAIL" "$log" ;;
    */tests-*) grep -E "^FAILED|^ERROR|passed|failed" "$log" | tail -n 20 ;;
    *) tail -n 16 "$log" ;;
  esac
done
exit "$failed"
