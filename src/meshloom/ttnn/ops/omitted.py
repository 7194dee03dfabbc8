"""Ops of the original that are not covered, each with its reason, which an error and the page of coverage give."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

REASONS: Mapping[str, str] = {
    "It moves weights ahead of the ops that read them, between memories of one chip: there is nothing to compute": """
        dram_prefetcher experimental.create_global_circular_buffer_for_matmul_1d
        experimental.create_global_circular_buffer_for_tensor_prefetcher
        experimental.create_prefetcher_pipes_for_tensor_prefetcher experimental.is_tensor_prefetcher_supported
        experimental.queue_tensor_prefetcher_request experimental.start_tensor_prefetcher
        experimental.stop_tensor_prefetcher experimental.tensor_prefetcher_block_count_for_matmul_1d
        experimental.wait_for_cq_on_tensor_prefetcher""",
    "It is an example or a test of the original itself": """
        composite_example composite_example_multiple_return test_hang_device_operation
        experimental.test_dram_prefetcher_consumer experimental.test_dram_prefetcher_validator
        experimental.test_tensor_prefetcher_pipe_consumer experimental.test_tensor_prefetcher_pipe_validator""",
    "It runs kernels that the user wrote in C++, and kernels are Python here": """
        generic_op experimental.prepare_generic_op""",
    "It asks which cores of a chip an op would use, and no cores work here": """
        experimental.can_use_fused_msda_from_offsets_l1_value experimental.get_moe_combine_cores
        experimental.get_moe_tilize_drain_core experimental.get_moe_worker_mcast_bounding_box
        experimental.get_weight_core_shard_maps experimental.get_weight_mem_configs""",
    "It copies to some cores of a device, and a part here is on a device as a whole": """
        copy_host_to_device_tensor_partial""",
    "Its operands are packed for the cores of one chip, in an order of which we know no description": """
        experimental.add_shared_expert_weights experimental.deepseek.mla.matmul_wo
        experimental.deepseek.moe.deepseek_moe_gate experimental.deepseek.moe.generalized_moe_gate
        experimental.deepseek.moe.moe_gate_mm experimental.moe_compute experimental.moe_gpt
        experimental.prepare_w0_w1_tensor_for_moe_compute experimental.prepare_w0_w1_tensor_with_bias
        experimental.prepare_w2_tensor_for_moe_compute experimental.prepare_w2_tensor_with_bias
        experimental.selective_reduce_combine experimental.topk_router_gpt""",
    "It exchanges data with a service that runs beside the program": """
        experimental.deepseek_prefill.inbound_socket_service_sync
        experimental.deepseek_prefill.outbound_socket_service_sync experimental.recv_async_h2d
        experimental.send_async_d2h""",
    "We know no description of what its operands mean: experts whose tokens lie in regions of a buffer": """
        experimental.deepseek_moe_fast_reduce_nc_fused experimental.deepseek_prefill.combine
        experimental.deepseek_prefill.combine_fabric2d experimental.deepseek_prefill.dispatch
        experimental.deepseek_prefill.dispatch_fabric2d experimental.deepseek_prefill.hybrid_routed_expert_moe
        experimental.deepseek_prefill.hybrid_routed_expert_moe_forwarding_buffer
        experimental.deepseek_prefill.moe_fused_swiglu experimental.deepseek_prefill.moe_padding_config
        experimental.deepseek_prefill.offset_cumsum""",
    "We know no description of what its operands mean: caches that several devices share": """
        experimental.deepseek_prefill.pack_scaled_fp8_kv_cache experimental.deepseek_prefill.rotary_embedding_indexed
        experimental.deepseek_prefill.update_padded_kv_cache experimental.deepseek_prefill.zero_padded_kv_cache
        experimental.indexed_fused_update_cache""",
    "We know no description of what its operands mean: attention to chosen keys, and what chooses them": """
        experimental.deepseek_prefill.attn_res_gather_softmax
        experimental.deepseek_prefill.compressor_state_exchange experimental.deepseek_prefill.csa_compressor
        experimental.deepseek_prefill.mhc_split_sinkhorn experimental.indexer_score_dsa experimental.indexer_score_msa
        experimental.ring_indexer_score_dsa transformer.ring_mla transformer.sparse_sdpa transformer.sparse_sdpa_msa""",
    "We know no description of what its operands mean: parts of a recurrence in chunks": """
        experimental.kda.affine_exclusive_scan experimental.kda.chain_affine_transforms
        experimental.kda.prepare_chunk_recurrence experimental.kda.qkv_causal_conv1d_silu
        experimental.kda.qkv_causal_conv1d_silu_with_carry experimental.kda.recurrent_chunk_scan
        experimental.kda.reduce_affine_transforms experimental.kda.select_final_carry
        experimental.kda.summarize_chunk_recurrence transformer.gated_delta_attn_seq""",
    "We know no description of what its operands mean": """
        experimental.apply_twiddles_xl experimental.fft_radix_pass experimental.halo_scatter
        experimental.multi_scale_deformable_attn experimental.neighbor_pad_halo
        experimental.nlp_concat_heads_boltz experimental.nlp_create_qkv_heads_boltz
        experimental.nlp_create_qkv_heads_segformer situ_glu""",
    "Descriptions of it differ: the gradient is zero, or the sum of all of it everywhere": """
        fill_bw""",
}


@cache
def reason_of(name: str) -> str:
    """Why an op is not covered; nothing if it is not among those that were left out.

    >>> reason_of("generic_op")
    'It runs kernels that the user wrote in C++, and kernels are Python here'
    """
    return next((reason for reason, names in REASONS.items() if name in names.split()), "")
