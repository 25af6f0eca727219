#!/usr/bin/env bash
# compute-sanitizer over the block's plans at small shapes: memcheck on a whole step, racecheck on the
# row kernels, initcheck on a whole step. Of the zoo, what the block has not: products with tails, and
# tensors that are turned.
#
#   bash benchmarks/sanitize.sh OUT [PYTHON]
set -uo pipefail
out=${1:?usage: benchmarks/sanitize.sh OUT [PYTHON]} python=${2:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$out" && out=$(cd "$out" && pwd) && cd "$root" || exit 2
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" PYTORCH_NO_CUDA_MEMORY_CACHING=1

step=("$python" -m megafuse profile --no-check --one-step)
small=(rankmixer --shape 2,16,128,2)
rings=(rankmixer --shape 512,16,64,2) # 8,192 rows: rings in shared memory, and the shelf
full=(rankmixer --shape 2,16,128,2 --dtype fp32)
tails=(zoo:mixer_pre_norm --dtype bf16)
# Waived: racecheck of turned tensors. The tool ends with an error of its own ("failed to handle a
# hardware exception") in PyTorch's products and convolutions, which run before any kernel of ours.
turned=(zoo:convnext --dtype bf16)
# Builds the kernels, so that the tools see runs only.
for args in "${small[*]}" "${rings[*]}" "${full[*]}" "${tails[*]}" "${turned[*]}"; do
  # shellcheck disable=SC2086
  "${step[@]}" $args > /dev/null 2>&1 &
done
wait

# Driver calls that fail are none of the tools' business: cuda-bindings' loader asks for functions that
# a driver may lack (cuGetProcAddress_v2: invalid argument), and our launcher raises on any error of its
# own.
tool() { timeout 300 compute-sanitizer --report-api-errors no --tool "$@"; }
ours='kns=mf_' rows='kne=mf_[FB][0-9]+(_finish)?'
strict=(--error-exitcode 9 --kernel-regex)
declare -A running=()
tool memcheck "${strict[@]}" "$ours" "${step[@]}" "${small[@]}" > "$out/memcheck-small.log" 2>&1 &
running[memcheck-small]=$!
tool memcheck "${strict[@]}" "$ours" "${step[@]}" "${rings[@]}" > "$out/memcheck-rings.log" 2>&1 &
running[memcheck-rings]=$!
tool memcheck "${strict[@]}" "$ours" "${step[@]}" "${tails[@]}" > "$out/memcheck-tails.log" 2>&1 &
running[memcheck-tails]=$!
tool memcheck "${strict[@]}" "$ours" "${step[@]}" "${turned[@]}" > "$out/memcheck-turned.log" 2>&1 &
running[memcheck-turned]=$!
tool racecheck "${strict[@]}" "$rows" "${step[@]}" "${small[@]}" > "$out/racecheck-small.log" 2>&1 &
running[racecheck-small]=$!
tool racecheck "${strict[@]}" "$rows" "${step[@]}" "${rings[@]}" > "$out/racecheck-rings.log" 2>&1 &
running[racecheck-rings]=$!
# initcheck has to watch every kernel: one that is filtered out does not count as writing, and all that
# PyTorch wrote would be called uninitialised. So PyTorch's kernels are reported too, and only reports
# located in ours ("at mf_...") are faults; the tool's status is the step's. In float32, whose products
# PyTorch computes: the tool does not see what the copy engine stores, so that every row a 16-bit
# product wrote would be reported (F3, F5, B1, B4, B7). Waived for those; tests/gpu runs them on memory
# that is full of NaN.
tool initcheck --print-limit 100000 "${step[@]}" "${full[@]}" > "$out/initcheck.log" 2>&1 &
running[initcheck]=$!

failed=0
for name in "${!running[@]}"; do
  wait "${running[$name]}" || { failed=1; echo "$name FAILED"; }
  echo "$name: $(grep -E 'SUMMARY' "$out/$name.log" | tail -n 1)"
done
inside=$(grep -cE '=+ +at (void )?mf_' "$out/initcheck.log")
all=$(grep -cE '=+ +at ' "$out/initcheck.log")
[ "$inside" = 0 ] || { failed=1; echo "initcheck FAILED"; }
grep -q 'ERROR SUMMARY' "$out/initcheck.log" || failed=1 # it never got that far
echo "initcheck: $inside reports in our kernels, $((all - inside)) in others'"
exit "$failed"
