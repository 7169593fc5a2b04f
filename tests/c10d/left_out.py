"""The tests of PyTorch that "collx" does not pass, with the reason for each."""

from tests.c10d.suite import needing_gpus

NEEDS_GPUS = "needs a GPU for each rank"

_BY_REASON = {
    # Without a decorator that says so; those that have one are added below.
    NEEDS_GPUS: """
    all_to_all_cuda all_to_all_cuda_complex all_to_all_full_group_cuda all_to_all_group_cuda
    """,
    "applies to NCCL only": """
    all_gather_v_cuda batch_isend_irecv_mixed_backend_err batch_isend_irecv_nccl
    batch_isend_irecv_no_rank_zero_nccl batch_isend_irecv_op_err batch_isend_irecv_op_list_err
    batch_isend_irecv_ring_exchange_nccl batch_isend_irecv_self_nccl coalescing_manager
    coalescing_manager_async ddp_profiling_execution_trace nccl_backend_bool_allgather
    nccl_backend_bool_allreduce nccl_backend_bool_broadcast nccl_backend_bool_reduce
    nccl_high_priority_stream reduce_scatter_v_cuda send_recv_nccl
    send_recv_nccl_autograd_profiler send_recv_nccl_torch_profiler
    """,
    "is skipped by PyTorch for every backend": """
    broadcast_object_list ddp_has_finalized ddp_hook_pickling_powerSGD
    ddp_profiling_autograd_profiler ddp_sync_bn_training_vs_eval
    """,
    "needs torchvision": """
    SyncBatchNorm_process_group
    """,
    "expects the message of Gloo; that of collx names the ranks that did not answer": """
    barrier_timeout_full_group barrier_timeout_global barrier_timeout_group
    """,
    "calls monitored_barrier, which PyTorch supports for Gloo only": """
    monitored_barrier_failure_order monitored_barrier_gloo monitored_barrier_gloo_subgroup
    monitored_barrier_wait_all_ranks
    """,
    "expects a backend name in a log where PyTorch writes custom for all third-party ones": """
    ddp_logging_data_cpu
    """,
}

REASONS = dict.fromkeys(needing_gpus(), NEEDS_GPUS)
REASONS |= {f"test_{name}": why for why, names in _BY_REASON.items() for name in names.split()}
