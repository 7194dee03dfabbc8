"""What the arguments of ops are, by their names: `help` shows it of every op that has an argument of the name.

An op's function says only what differs, as the `dim` of an op that takes several. A default that is a fraction, a text,
a bool or a choice tells it too, and an argument that is None by default may be None.
"""

from __future__ import annotations

import inspect
from enum import Enum

_NAMES = {
    "Tensor": """
        a addcmul_input_tensor1 addcmul_input_tensor2 any attention_mask attention_sink attention_weights
        attn_mask b batch_id beta bias bx cache cache_tensor1 cache_tensor2 combine_output counts
        cu_window_seqlens dispatched_buffer elements expert_dispatch_table expert_mask expert_region_offsets
        expert_token_counts fused_ternary_input_a fused_ternary_input_b g gamma gate global_expert_idx_table
        grad h_prev halo_buffer imag index indices input input_a input_b input_e4m3 input_ids input_kv
        input_scale input_tensor0 input_tensor1 input_tensor2 input_tensor_a input_tensor_b input_tensor_k
        input_tensor_l input_tensor_m input_tensor_q input_tensor_s input_tensor_v joint_tensor_k joint_tensor_q
        joint_tensor_v mat2 mean metadata other output output_tensor_l output_tensor_m output_tensor_s
        page_table persistent_output_buffer persistent_weight_buffer preallocated_output predicate q real
        reference_points rstd running_mean running_var sampling_locations sampling_offsets scores sparsity src
        stats temp test_elements tid2eid total_norm trans_mat up v weight weights x""",
    "int": """
        C C_in_block H N N1 N2 W X Y Z alignment axis cache_position_modulo channels chunks cq_id dim dim1 dim2
        divisor divisor_override expert_dim experts_per_chip fsdp_cluster_axis groups hOnes head_dim_v
        ignore_index input_h input_height input_length input_w input_width k length local_expert_id logical_h
        logical_h_mask logical_w_mask max_active_tokens max_dispatched_tokens_per_expert min_active_tokens
        n_activated_experts n_routed_experts normalized_dims num_devices num_experts_per_token num_groups
        num_heads_per_device num_slices num_tokens output_concat_dim output_pad_h output_pad_w output_shard_dim
        repeats ring_id seed seq_len_end seq_len_start slice_dim slice_index spec_multi_pos_tiles split_head_dim
        split_output_width stride_h stride_w t_front_pad token_index torch_rank valid_length wOnes""",
    "bool": "momentum_initialized reduction_mean share_cache transpose_hw",
    "float": """
        alpha angle dampening eps fill_value fused_ternary_scalar high limit low max_norm momentum p pad_value
        probability scalar scale val_hi val_lo value weight_decay""",
    "MemoryConfig": "memory_config_ag memory_config_mm memory_config_rs rs_output_mem_config",
    "Sequence[int]": """
        chunk_sizes cur_pos dilation dims index_dims kernel_size output_padding output_size output_tensor_end
        padding repeat_dims shared_expert_ids steps stride update_idxs""",
    "Sequence[Tensor]": "input_tensors_b inputs out",
    "str": "mode padding_mode reduce reduction rounding_mode",
    "Operand": "false_value input_c input_tensor_c max min true_value",
    "int | Sequence[int]": "padding_left padding_right shifts",
    "DataType": "dtype",
    "MeshCoordinate": "receiver_coord root_coord sender_coord",
    "Activation": "activation fused_activation",
    "Layout": "layout",
    "MeshDevice": "device mesh_device",
    "TensorToMesh": "mapper mesh_mapper",
    "Collection[Sequence[int]]": "mesh_coords",
    "Sequence[int] | Tensor": "ends starts",
    "str | os.PathLike[str]": "cache_file_name file_name",
    "MeshSocket": "mesh_socket",
    "Shapes": "shape",
    "int | Tensor": "seeds",
    "PagedCacheGeometryOverride": "paged_cache_geometry",
    "Sequence[Activation]": "activations input_tensor_a_activations input_tensor_b_activations ops_chain",
    "Sequence[float]": "coeffs",
    "BcastOpMath": "math_op",
    "Sequence[bool]": "are_required_outputs",
    "CoreRangeSet": "sub_core_grids",
    "Tile": "tile",
    "TensorMemoryLayout": "shard_scheme",
    "ShardOrientation": "shard_orientation",
    "float | Sequence[float]": "scale_factor",
    "tuple[float, float]": "center",
    "Sequence[Sequence[int]]": "spatial_shapes",
    "Sequence[int] | float": "input_tensor_start",
    "int | str": "full_N",
    "MathFidelity": "math_fidelity",
    "Conv3dConfig": "config",
    "torch.dtype": "torch_dtype",
    "Composer": "mesh_composer",
    "Callable[[Any], Any]": "preprocess",
    "MeshToTensor": "composer",
}
KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}
# Of names that are not among them, by how they end.
_ENDINGS = {
    "Tensor": ("tensor", "_grad", "_in", "_out", "_cache", "_imag", "_real", "_proj"),
    "Sequence[Tensor]": ("tensors", "_projs", "_biases"),
    "MemoryConfig": ("memory_config",),
    "DataType": ("_dtype",),
    "Sequence[int]": ("_shape",),
    "int": ("_size", "_idx", "_heads", "_channels", "_offset"),
}


def kind_of(name: str) -> str | None:
    """What an argument of that name is."""
    return KINDS.get(name) or next((kind for kind, ends in _ENDINGS.items() if name.endswith(ends)), None)


def annotate(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter of an op with its type, unless its function says one: that of its default, or of its name.

    >>> str(annotate(inspect.Parameter("scale", inspect.Parameter.KEYWORD_ONLY, default=None)))
    "scale: 'float | None' = None"
    """
    default, is_said = parameter.default, parameter.annotation is not inspect.Parameter.empty
    if is_said or parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return parameter
    if isinstance(default, (bool, float, str, Enum)):
        return parameter.replace(annotation=type(default).__name__)
    kind = kind_of(parameter.name) or (type(default).__name__ if isinstance(default, int) else "Any")
    return parameter.replace(annotation=f"{kind} | None" if default is None and kind != "Any" else kind)
