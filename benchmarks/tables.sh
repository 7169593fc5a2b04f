#!/bin/bash
# Measures the tables of docs/guide/performance.md on GPUs: benchmarks/tables.sh RANKS FOLDER
# Takes some minutes. `python benchmarks/markdown.py FOLDER/*.json --into docs/guide/performance.md` inserts
# them into the page, and likewise into docs/guide/comparison.md.
set -u
ranks=$1 folder=$2
mkdir -p "$folder"

bench() {  # NAME SECONDS ARGUMENT...: one process per rank, terminated after SECONDS
  local name=$1 seconds=$2
  shift 2
  timeout -k 10 "$seconds" python3 -m collx bench -g "$ranks" "$@" \
    --device cuda --dtype bfloat16 --peers all --json "$folder/$name.json" >"$folder/$name.txt" 2>"$folder/$name.log" ||
    { echo "$name: exit status $?"; tail -n 5 "$folder/$name.log"; }
  cat "$folder/$name.txt"
}

norm=allreduce_residual_rmsnorm
rows=1,8,16,64,128,256,512,2048
bench allreduce 90 allreduce -b 1K -e 256M -f 2 --host-time
bench fp8 75 ${norm}_fp8 --rows $rows --host-time
bench norm 100 $norm --rounding fp32,parity_weight --rows $rows --host-time
bench collectives 110 reducescatter allgather broadcast reduce gather scatter alltoall alltoallv \
  barrier --sizes 1K,4K,16K,64K,256K,1M,4M,16M,32M,64M --host-time
bench static 45 ${norm}_fp8_static --rows 1,64,512 --host-time
