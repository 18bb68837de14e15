#!/usr/bin/env bash
# `nox -s gpu` for a machine that has a GPU, Python and torch, but no nox and no package registry.
#   where there is one:   scripts/build-wheels --gpu     makes .gpu/wheels/; add wheels of whatever else that machine lacks
#   on the GPU machine:   scripts/gpu.sh [COMMAND...]    runs COMMAND, or the GPU tests and the benchmark
# The wheels go to a folder of their own, once, and give the entry points; the code itself is read from the checkout.
set -euo pipefail
cd "$(dirname "$0")/.."
site=${GPU_SITE:-${TMPDIR:-/tmp}/minisgl-gpu-site}
python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" .gpu/wheels/*.whl
sources=
for src in packages/*/src tests/plugins/minisgl-example/src; do sources+=$PWD/$src:; done
export PYTHONPATH=$sources$site${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
if [ $# -gt 0 ]; then exec "$@"; fi
spread=$(python3 -c "import xdist" 2>/dev/null && echo "-n 8" || true)
# Not only what is marked: kernels that the interpreter runs elsewhere are compiled here.
python3 -m pytest $spread tests/backends/{attention,communicator,moe,ops,quantization} tests/core/{platforms,test_gpu_tokens.py} \
  tests/models/test_gpu_parity.py
python3 scripts/make_model.py qwen3-0.6b .gpu/models/qwen3-0.6b
minisgl bench offline --model .gpu/models/qwen3-0.6b --dummy-weight --workload W
python3 scripts/gpu_tp --out .gpu/tp
if python3 -c "import ray, torch; assert torch.cuda.device_count() > 1" 2>/dev/null; then
  python3 -m pytest tests/cluster/test_two_gpus.py
fi
