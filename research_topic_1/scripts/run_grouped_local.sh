#!/usr/bin/env bash
# The production shape through the grouped GEMM backend.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_prod_local.sh" --gemm-backend grouped "$@"
