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
# `own` runs the tests with the mark `alone`, which cannot share a GPU with other tests, after the others
# and without the service.
set -u
kind=${1:?own or shared}
shift
status=0 none=5  # what pytest returns where no test is selected

folder=$(mktemp -d)
quit() { echo quit | nvidia-cuda-mps-control && rm -rf "$folder"; }
if [ "$kind" = shared ]; then export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"; fi
export CUDA_MPS_PIPE_DIRECTORY=$folder CUDA_MPS_LOG_DIRECTORY=$folder
nvidia-cuda-mps-control -d || exit 1
trap quit EXIT
if [ "$kind" = shared ]; then
  for world in ${WORLDS:-3 4 8}; do
    export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / world))
    python -m pytest -m cuda -k "cuda${world}shared and not failure" "$@" || status=1
  done
  exit $status
fi
most=$(($(env -u OMP_NUM_THREADS nproc) / 3))  # nproc returns OMP_NUM_THREADS where it is set
workers=${WORKERS:-$((most < 1 ? 1 : most > 10 ? 10 : most))}
# Together all blocks must fit, or the kernels of two worlds, each spinning on one GPU, could keep each
# other out on the other GPU. The service may round a share up, so some room is left. It promises no
# room for clusters of blocks: calls form none here, and the tests that need them are `alone`.
export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / (workers + 1))) COLLX_NO_CLUSTERS=1
python -m pytest -m 'cuda and not alone' -k 'not shared' -n "$workers" --dist worksteal "$@"
beside=$?
trap - EXIT
quit
unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY CUDA_MPS_ACTIVE_THREAD_PERCENTAGE COLLX_NO_CLUSTERS
python -m pytest -m 'cuda and alone' -k 'not shared' "$@"
alone=$?
# Arguments may select tests of one of the two runs alone, but not of none.
for result in $beside $alone; do
  [ "$result" -eq 0 ] || [ "$result" -eq $none ] || status=$result
done
[ "$beside" -ne $none ] || [ "$alone" -ne $none ] || status=$none
exit $status
