"""The tests of PyTorch that "collx" does not pass, with the reason for each."""

_BY_REASON = {
    "needs a GPU for each rank": """
    1_level_hierarchical_model_averager_equivalent_to_periodic_model_averager
    3_level_hierarchical_model_averager DistributedDataParallel
    DistributedDataParallel_SyncBatchNorm DistributedDataParallel_SyncBatchNorm_2D_Input
    DistributedDataParallel_SyncBatchNorm_Channels_Last
    DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value
    DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient
    DistributedDataParallel_SyncBatchNorm_No_Affine
    DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process
    DistributedDataParallel_SyncBatchNorm_half DistributedDataParallel_non_default_stream
    DistributedDataParallel_with_amp_and_grad_is_view DistributedSampler_padding all_gather_cuda
    all_gather_cuda_complex all_gather_into_cat_tensor_cuda all_gather_into_stack_tensor_cuda
    all_reduce_sum_cuda all_reduce_sum_cuda_async all_reduce_sum_cuda_complex all_to_all_cuda
    all_to_all_cuda_complex all_to_all_full_group_cuda all_to_all_group_cuda
    all_to_all_single_equal_split_cuda all_to_all_single_equal_split_cuda_complex
    all_to_all_single_equal_split_full_group_cuda all_to_all_single_equal_split_group_cuda
    all_to_all_single_unequal_split_cuda all_to_all_single_unequal_split_cuda_complex
    all_to_all_single_unequal_split_full_group_cuda all_to_all_single_unequal_split_group_cuda
    average_parameters barrier_cuda barrier_full_group_cuda barrier_group_cuda broadcast_cuda
    compute_bucket_assignment_by_size_sparse_error_with_logger
    compute_bucket_assignment_by_size_sparse_error_without_logger ddp_apply_optim_in_backward
    ddp_apply_optim_in_backward_grad_as_bucket_view_false
    ddp_apply_optim_in_backward_ignored_params ddp_broadcast_buffer
    ddp_broadcast_buffer_via_hook ddp_bucket_cap_mb_list ddp_buffer_hook_allreduce
    ddp_buffer_hook_allreduce_return_future ddp_build_debug_param_to_name_mapping
    ddp_build_debug_param_to_name_mapping_requires_grad ddp_comm_hook_logging
    ddp_compile_static_graph ddp_control_flow_different_across_ranks
    ddp_control_flow_same_across_ranks ddp_device ddp_device_mesh_initialization
    ddp_forward_backward_hook ddp_grad_div_uneven_inputs ddp_hook_parity_allreduce
    ddp_hook_parity_allreduce_process_group ddp_hook_parity_post_localSGD
    ddp_hook_parity_powerSGD ddp_ignore_params_arg ddp_inference ddp_join_model_equivalence
    ddp_logging_data_gpu ddp_model_diff_num_params_across_ranks
    ddp_model_diff_shape_across_ranks ddp_multiple_nested_unused_params_err_ignore_params
    ddp_multiple_nested_unused_params_error ddp_namedtuple
    ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none
    ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none
    ddp_native_mixed_precision_ignored_params
    ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none
    ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none ddp_new_tensor_in_fwd
    ddp_new_tensor_in_fwd_static_graph ddp_profiling_torch_profiler ddp_python_error_logged
    ddp_remove_autograd_hooks ddp_returns_tensor_with_no_grad ddp_shared_grad_acc_unused_params
    ddp_sink_noclone ddp_static_graph_nested_types ddp_sync_module_states
    ddp_uneven_input_exception ddp_uneven_input_join_disable ddp_uneven_inputs
    ddp_uneven_inputs_stop_iteration_sync_bn ddp_unused_params_rebuild_buckets_exception
    ddp_zero_output_features detect_ddp_is_actually_static different_graph_across_ranks
    gather_cuda get_data_parallel_params invalid_static_graph monitored_barrier_allreduce_hang
    monitored_barrier_allreduce_hang_wait_all_ranks new_subgroups new_subgroups_by_enumeration
    new_subgroups_by_enumeration_input_rank_exceeds_world_size
    new_subgroups_by_enumeration_negative_input_rank new_subgroups_group_size_exceeds_world_size
    new_subgroups_overlap_not_allowed new_subgroups_world_size_not_divisible_by_group_size
    output_unused_in_loss_dict_module output_unused_in_loss_tuple_module periodic_model_averager
    periodic_model_averager_param_group post_localSGD_optimizer_parity
    post_localSGD_optimizer_parity_grad_is_view
    post_localSGD_optimizer_parity_with_hierarchical_sgd
    post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view
    post_localSGD_optimizer_step_reload reduce_scatter_tensor_cuda reduce_sum_cuda
    reduce_sum_cuda_twice scatter_cuda scatter_cuda_complex skip_all_reduce_unused_parameters
    sparse_all_reduce_sum_cuda stateless_api_with_ddp static_graph_multi_forward sync_bn_logged
    undefined_grad_parity_unused_parameters verify_model_across_rank_with_logger
    verify_model_across_rank_without_logger
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

REASONS = {f"test_{name}": why for why, names in _BY_REASON.items() for name in names.split()}
