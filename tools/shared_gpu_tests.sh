#!/bin/bash
# Tests worlds of 3, 4 and 8 ranks on one GPU, through CUDA's multi-process service:
#
#     tools/shared_gpu_tests.sh [ARGUMENT OF PYTEST...]
#
# WORLDS="4 8" selects worlds. Each rank gets an equal share of the GPU, because a rank that fills it
# keeps out the ranks that it waits for. A killed process takes the others of the service with it, so
# the tests that kill ranks run in a world of their own in `make test-gpu`.
set -u
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
folder=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY=$folder CUDA_MPS_LOG_DIRECTORY=$folder
nvidia-cuda-mps-control -d || exit 1
trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$folder"' EXIT
status=0
for world in ${WORLDS:-3 4 8}; do
  CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / world)) \
    python -m pytest -m cuda -k "cuda${world}shared and not failure" "$@" || status=1
done
exit $status
