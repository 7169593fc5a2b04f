#!/bin/bash
# Runs the tests on GPUs, with CUDA's multi-process service:
#
#     tools/gpu_tests.sh own [PYTEST ARGUMENT...]     tests with one GPU for each rank
#     tools/gpu_tests.sh shared [PYTEST ARGUMENT...]  tests with 3, 4 and 8 ranks on one GPU
#
# own: compilers take most of the time, so WORKERS processes of pytest-xdist run in parallel, and
# each has an equal share of every GPU. shared: each rank has such a share, because a rank that
# fills the GPU blocks the ranks that it waits for. WORLDS="4 8" selects world sizes.
#
# Killing a process ends all processes of the service, so `shared` omits the tests of failures.
# `own` runs the tests with the mark `alone`, which cannot share a GPU with other tests, after the
# others and without the service.
set -u
kind=${1:?own or shared}
shift
status=0 none=5  # 5: pytest's exit status if no test is selected

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
most=$(($(env -u OMP_NUM_THREADS nproc) / 3))  # nproc returns OMP_NUM_THREADS if it is set
workers=${WORKERS:-$((most < 1 ? 1 : most > 10 ? 10 : most))}
# The blocks of all workers must fit at once. Otherwise, the kernels of two worlds, each of which
# spins on one GPU, could block each other on the other GPU. The service may round a share up, so
# some space remains free. It does not guarantee space for clusters of blocks, so calls use none
# here, and the tests that need clusters are `alone`.
export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / (workers + 1))) COLLX_NO_CLUSTERS=1
python -m pytest -m 'cuda and not alone' -k 'not shared' -n "$workers" --dist worksteal "$@"
beside=$?
trap - EXIT
quit
unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY CUDA_MPS_ACTIVE_THREAD_PERCENTAGE COLLX_NO_CLUSTERS
python -m pytest -m 'cuda and alone' -k 'not shared' "$@"
alone=$?
# Arguments may select tests of only one of the two runs, but not of none.
for result in $beside $alone; do
  [ "$result" -eq 0 ] || [ "$result" -eq $none ] || status=$result
done
[ "$beside" -ne $none ] || [ "$alone" -ne $none ] || status=$none
exit $status
