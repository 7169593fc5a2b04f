#!/bin/bash
# Runs the tests on GPUs, with CUDA's multi-process service:
#
#     tools/gpu_tests.sh own [ARGUMENT OF PYTEST...]     ranks that have a GPU each
#     tools/gpu_tests.sh shared [ARGUMENT OF PYTEST...]  3, 4 and 8 ranks on one GPU
#
# own: most of the time goes to compilers, so WORKERS processes of pytest-xdist run side by side, and
# each has an equal share of every GPU. shared: each rank has such a share, because a rank that fills
# the GPU keeps out the ranks that it waits for; WORLDS="4 8" selects worlds.
#
# A killed process takes the others of the service with it, so `shared` leaves out the tests of failures.
# `own` runs them after the others and without the service, as all that cannot share a GPU with other
# tests: they have the mark `alone`.
set -u
kind=${1:?own or shared}
shift
status=0

tests() {  # MARKS NAMES ARGUMENT...
  python -m pytest -m "$1" -k "$2" "${@:3}"
  local result=$?
  [ $result -eq 0 ] || [ $result -eq 5 ] || status=1  # 5: none of the tests was selected
}

folder=$(mktemp -d)
quit() { echo quit | nvidia-cuda-mps-control && rm -rf "$folder"; }
if [ "$kind" = shared ]; then export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"; fi
export CUDA_MPS_PIPE_DIRECTORY=$folder CUDA_MPS_LOG_DIRECTORY=$folder
nvidia-cuda-mps-control -d || exit 1
trap quit EXIT
if [ "$kind" = shared ]; then
  for world in ${WORLDS:-3 4 8}; do
    export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / world))
    tests cuda "cuda${world}shared and not failure" "$@"
  done
  exit $status
fi
most=$(($(nproc) / 3))
workers=${WORKERS:-$((most < 1 ? 1 : most > 10 ? 10 : most))}
# Together all blocks must fit, or the kernels of two worlds, each spinning on one GPU, could keep each
# other out on the other GPU. The service may round a share up, so some room is left. It promises no
# room for clusters of blocks: calls form none here, and the tests that need them are `alone`.
export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / (workers + 1))) COLLX_NO_CLUSTERS=1
tests 'cuda and not alone' 'not shared' -n "$workers" --dist worksteal "$@"
trap - EXIT
quit
unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY CUDA_MPS_ACTIVE_THREAD_PERCENTAGE COLLX_NO_CLUSTERS
tests 'cuda and alone' 'not shared' "$@"
exit $status
