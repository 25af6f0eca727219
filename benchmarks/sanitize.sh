#!/usr/bin/env bash
# compute-sanitizer over the block's plans at a small shape: memcheck and initcheck on a whole step,
# racecheck on the row kernels. PyTorch's own kernels are left out.
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
for tool in memcheck initcheck racecheck; do
  filter=(--kernel-regex "kns=mf_")
  [ "$tool" = racecheck ] && filter=(--kernel-regex 'kne=mf_[FB][0-9]+(_finish)?')
  timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 9 "${filter[@]}" "${step[@]}" \
    > "$out/$tool.log" 2>&1 || { failed=1; echo "$tool FAILED"; }
  tail -n 2 "$out/$tool.log"
done
exit "$failed"
