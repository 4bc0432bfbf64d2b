#!/usr/bin/env bash
# Run bench/gpu.py in nine minutes on a machine without a network:  bash bench/gpu.sh [RESULT.json [OPTION...]]
# What a machine with PyTorch (2.11 or newer) lacks comes from wheels in the folder $WHEELS, if that is set:
#   python3 -m pip download --no-deps -c constraints.txt -d "$WHEELS" transformers tokenizers huggingface-hub httpx2 \
#     httpcore2 truststore sniffio peft accelerate pydantic pydantic-core annotated-types typing-inspection \
#     bitsandbytes      # 65 MB, of which CUDA's libraries of bitsandbytes are 43
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install --quiet --no-index --no-deps --target "$packages" "$WHEELS"/*.whl
fi
PYTHONPATH="$packages" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 timeout $((540 - SECONDS)) "$python" bench/gpu.py --output "${1:-gpu.json}" "${@:2}"
