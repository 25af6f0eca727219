#!/usr/bin/env bash
# compute-sanitizer over the block's plans at a small shape: memcheck and initcheck on a whole step,
# racecheck on the row kernels. PyTorch's own kernels are left out of the verdict.
#
#   bash benchmarks/sanitize.sh OUT [PYTHON]
set -uo pipefail
out=${1:?usage: benchmarks/sanitize.sh OUT [PYTHON]} python=${2:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$out" && out=$(cd "$out" && pwd) && cd "$root" || exit 2
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" PYTORCH_NO_CUDA_MEMORY_CACHING=1
step=("$python" -m megafuse profile rankmixer --shape 2,16,128,2 --no-check --one-step)
failed=0
"${step[@]}" > /dev/null 2>&1 # builds the kernels, so that the tools see runs only

# check TOOL OPTION...: the log goes to OUT/TOOL.log; returns the tool's own exit status.
check() {
  local tool=$1
  shift
  # Driver calls that fail are none of the tools' business: cuda-bindings' loader asks for functions
  # that a driver may lack (cuGetProcAddress_v2: invalid argument), and our launcher raises on any
  # error of its own.
  timeout 300 compute-sanitizer --tool "$tool" --report-api-errors no "$@" "${step[@]}" \
    > "$out/$tool.log" 2>&1
}

fail() { failed=1; echo "$1 FAILED"; }

check memcheck --error-exitcode 9 --kernel-regex "kns=mf_" || fail memcheck
tail -n 2 "$out/memcheck.log"

# initcheck has to watch every kernel: one that is filtered out does not count as writing, and all
# that PyTorch wrote would be called uninitialised. So PyTorch's kernels are reported too, and only
# reports located in ours ("at mf_...") are faults. No error exit: the tool's status is the step's.
check initcheck --print-limit 100000 || fail initcheck
ours=$(grep -cE '=+ +at (void )?mf_' "$out/initcheck.log")
all=$(grep -cE '=+ +at ' "$out/initcheck.log")
[ "$ours" = 0 ] || fail initcheck
grep -q 'ERROR SUMMARY' "$out/initcheck.log" || fail initcheck # it never got that far
echo "initcheck: $ours reports in our kernels, $((all - ours)) in others'"

check racecheck --error-exitcode 9 --kernel-regex 'kne=mf_[FB][0-9]+(_finish)?' || fail racecheck
tail -n 2 "$out/racecheck.log"
exit "$failed"
