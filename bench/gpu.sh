#!/usr/bin/env bash
# Run bench/gpu.py in nine minutes on a machine without a network:  bash bench/gpu.sh [RESULT.json]
# Missing packages come from wheels in the folder $WHEELS, if that is set.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install --quiet --no-index --no-deps --target "$packages" "$WHEELS"/*.whl
fi
PYTHONPATH="$packages" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 timeout 540 "$python" bench/gpu.py --output "${1:-gpu.json}"
