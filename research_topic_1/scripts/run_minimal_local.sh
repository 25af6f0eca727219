#!/usr/bin/env bash
# The smallest useful run: the public instance's shape through torch.bmm.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_prod_local.sh" \
  --batch-size 4 --tokens 16 --dim 128 --k 2 --gemm-backend bmm "$@"
