"""Ops that are a collective and something else at once, against torch on the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import meshloom as loom
from meshloom import ttnn
from meshloom.errors import OperandError, UnsupportedError
from ttnn_cases import composed, distributed, held, label, mesh, tensor_of
from ttnn_draws import P, R, S

EXPERIMENTAL = ttnn.experimental
GRIDS = [((1, 1), 1), ((1, 4), 1), ((2, 2), 0), ((2, 2), 1)]
DTYPES = [ttnn.float32, ttnn.bfloat16]
grids = pytest.mark.parametrize(("grid", "axis"), GRIDS, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def cut(whole: torch.Tensor, grid: tuple[int, ...], axis: int, placement: Any, dtype: Any = ttnn.float32) -> Any:
    """A whole that one axis of a mesh cuts, or of which it has terms."""
    made = distributed(whole, grid, [placement if each == axis else R for each in range(len(grid))])
    return tensor_of(made.block, grid, list(made.tensor_topology().placements()), dtype)


def near(found: Any, want: torch.Tensor, dtype: Any, scale: float = 1.0) -> None:
    """Raise unless the whole that a label claims is this one."""
    whole = composed(found)
    assert whole is not None, label(found)
    tolerance = 1e-4 if dtype is ttnn.float32 else 3e-2 * scale
    torch.testing.assert_close(whole.double(), want.double(), rtol=tolerance, atol=tolerance)


def placed(found: Any, grid: tuple[int, ...], axis: int, placement: Any) -> None:
    """Raise unless the axis of the group does this, and the others nothing."""
    told = [R if size == 1 and placement != R else placement if each == axis else R for each, size in enumerate(grid)]
    sizes = list(found.tensor_topology().distribution_shape())
    have = label(found) if len(sizes) == len(grid) else label(found) * len(grid)
    assert [a for a, size in zip(have, grid, strict=True) if size > 1] == [
        b for b, size in zip(told, grid, strict=True) if size > 1
    ], (have, told)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 2


# what is sent


@pytest.mark.parametrize("mode", ["direct", "host", "fabric"])
def test_what_fused_ops_send_is_recorded_and_the_same_in_every_mode(mode: str) -> None:
    grid, axis = (1, 4), 1
    x, w = cut(numbers(1, 1, 4, 8), grid, axis, S(3)), cut(numbers(8, 8, seed=1), grid, axis, R)
    part = cut(numbers(8, 8, seed=1), grid, axis, S(0))
    keys = cut(numbers(1, 2, 8, 4), grid, axis, S(2))
    how = {"multi_device_global_semaphore": [], "cluster_axis": axis}
    ring = {"logical_n": 8, "cluster_axis": axis, "mesh_device": mesh(grid), "multi_device_global_semaphore": []}
    calls = {
        "all_gather": lambda: EXPERIMENTAL.all_gather_minimal_matmul_async(x, w, **how)[0],
        "reduce_scatter": lambda: EXPERIMENTAL.minimal_matmul_strided_reduce_scatter_async(
            x, part, 3, [], ttnn.CoreCoord(0, 6), cluster_axis=axis
        )[1],
        "all_reduce": lambda: EXPERIMENTAL.dit_fused_distributed_rmsnorm(x, axis, mesh(grid), []),
        "all_gather twice": lambda: ttnn.transformer.ring_joint_scaled_dot_product_attention(
            keys, keys, keys, joint_strategy="rear", dim=2, num_links=1, **ring
        )[0],
    }
    for kind, call in calls.items():
        plain = call()
        with loom.record() as log, ttnn.collective_mode(mode):
            found = call()
        assert dict(log.kinds()) == {kind.split()[0]: 2 if "twice" in kind else 1}
        torch.testing.assert_close(found.block, plain.block)


def test_fused_ops_run_in_traces() -> None:
    grid, axis = (2, 2), 1
    x, w = numbers(1, 1, 4, 8), numbers(8, 8, seed=1)
    given, weight = cut(x, grid, axis, S(3)), cut(w, grid, axis, R)
    keys = cut(numbers(1, 2, 8, 4), grid, axis, S(2))
    ring = {"logical_n": 8, "cluster_axis": axis, "mesh_device": mesh(grid), "multi_device_global_semaphore": []}
    gather = {"multi_device_global_semaphore": [], "cluster_axis": axis}

    def run() -> list[Any]:
        made = ttnn.transformer.ring_joint_scaled_dot_product_attention(
            keys, keys, keys, joint_strategy="rear", dim=2, num_links=1, is_causal=True, **ring
        )
        shared = ttnn.transformer.ring_distributed_scaled_dot_product_attention(
            weight_heads, weight_heads, weight_heads, 2
        )
        norm = EXPERIMENTAL.dit_fused_distributed_layernorm(given, axis, mesh(grid), [])
        return [made[0], made[2], shared, norm, *EXPERIMENTAL.all_gather_minimal_matmul_async(given, weight, **gather)]

    weight_heads = cut(numbers(1, 2, 8, 4, seed=5), grid, axis, R)
    trace = ttnn.begin_trace_capture(mesh(grid))
    captured = run()
    ttnn.end_trace_capture(mesh(grid), trace)
    for seed in (7, 8):
        for tensor in (given, keys, weight_heads):
            tensor.block.copy_(torch.randn(tensor.block.shape, generator=torch.Generator().manual_seed(seed)))
        ttnn.execute_trace(mesh(grid), trace, blocking=True)
        found = [each.block.clone() for each in captured]
        for each, want in zip(found, run(), strict=True):
            torch.testing.assert_close(each, want.block)
    ttnn.release_trace(mesh(grid), trace)


def test_choices_about_speed_are_accepted_and_change_nothing() -> None:
    grid, axis = (1, 2), 1
    x, w = cut(numbers(1, 1, 4, 8), grid, axis, S(3)), cut(numbers(8, 8, seed=1), grid, axis, R)
    given = (x, w, None, 3, [], ttnn.CoreCoord(0, 6))
    plain = EXPERIMENTAL.strided_all_gather_minimal_matmul_async(*given, cluster_axis=axis)
    found = EXPERIMENTAL.strided_all_gather_minimal_matmul_async(
        *given, cluster_axis=axis, mm_signal_aggregator_mode=ttnn.MMSignalAggregatorMode.On
    )
    assert torch.equal(found[1].block, plain[1].block)
    q, g = cut(numbers(1, 2, 2, 4), grid, axis, R), cut(-numbers(1, 2, 2).abs(), grid, axis, R)
    rule = ttnn.transformer.chunk_gated_delta_rule
    configs = [ttnn.ChunkGdnMonoProgramConfig(), ttnn.ChunkGdnPhasedProgramConfig(use_mcast=False)]
    for config in (*configs, ttnn.ChunkGdnFusedProgramConfig(num_producers=2)):
        out, _ = rule(q, q, q, g, g, program_config=config, wy_inverse=ttnn.ChunkGdnWyInverse.HORNER)
        assert torch.equal(out.block, rule(q, q, q, g, g)[0].block)
    assert str(ttnn.WorkerMode.DIRECT) == "WorkerMode.DIRECT" and ttnn.DispatchAlgorithm.SPARSE_MCAST_SHORTEST_PATH
    assert ttnn.LayerNormType.RMSNORM is not ttnn.LayerNormType.LAYERNORM
    assert len(ttnn.DistributedLayerNormStage) == 3


# products


@dtypes
@grids
def test_a_gather_before_a_product_gives_the_product_of_the_whole(grid: Any, axis: int, dtype: Any) -> None:
    x, w, bias = numbers(1, 1, 6, 8), numbers(8, 12, seed=1), numbers(1, 12, seed=2)
    gate, base = numbers(1, 1, 6, 12, seed=3), numbers(1, 1, 6, 12, seed=4)
    given = cut(x, grid, axis, S(3), dtype)
    weight, added, factor, first = (cut(each, grid, axis, R, dtype) for each in (w, bias, gate, base))
    how = {"multi_device_global_semaphore": [], "cluster_axis": axis}
    ag = EXPERIMENTAL.all_gather_minimal_matmul_async
    want = (composed(given).float() @ w + bias).float()
    (found,) = ag(given, weight, bias_tensor=added, **how)
    near(found, want, dtype)
    placed(found, grid, axis, R)
    pieces = ag(given, weight, bias_tensor=added, chunks=3, **how)
    assert [piece.shape[-1] for piece in pieces] == [4, 4, 4]
    near(pieces[2], want[..., 8:], dtype)
    assert [piece.shape[-1] for piece in ag(given, weight, chunk_sizes=[8, 4], **how)] == [8, 4]
    (fused,) = ag(
        given, weight, scalar=0.5, addcmul_input_tensor1=first, addcmul_input_tensor2=factor, bias_tensor=added, **how
    )
    near(fused, base + 0.5 * want * gate, dtype)
    assert fused.dtype is dtype
    (gated,) = ag(given, weight, fuse_swiglu=True, **how)
    halves = (composed(given).float() @ w).chunk(2, -1)
    near(gated, F.silu(halves[0]) * halves[1], dtype)
    with pytest.raises(UnsupportedError, match="a weight in shards"):
        ag(given, weight, fsdp_cluster_axis=0, **how)
    with pytest.raises(OperandError, match="5 equal pieces"):
        ag(given, weight, chunks=5, **how)


@dtypes
@grids
def test_a_strided_gather_gives_what_it_gathered_too(grid: Any, axis: int, dtype: Any) -> None:
    x, w = numbers(1, 1, 6, 8), numbers(8, 12, seed=1)
    given, weight = cut(x, grid, axis, S(3), dtype), cut(w, grid, axis, R, dtype)
    gathered, first, second = EXPERIMENTAL.strided_all_gather_minimal_matmul_async(
        given, weight, None, 3, [], ttnn.CoreCoord(0, 6), cluster_axis=axis, chunks=2, fused_activation="relu"
    )
    near(gathered, x, dtype)
    placed(gathered, grid, axis, R)
    want = (x @ w).relu()
    near(first, want[..., :6], dtype)
    near(second, want[..., 6:], dtype)


@dtypes
@grids
def test_a_product_before_a_reduce_scatter_gives_shards_of_the_product(grid: Any, axis: int, dtype: Any) -> None:
    x, w = numbers(1, 1, 8, 8), numbers(8, 12, seed=1)
    given, weight = cut(x, grid, axis, S(3), dtype), cut(w, grid, axis, S(0), dtype)
    rs = EXPERIMENTAL.minimal_matmul_strided_reduce_scatter_async
    product, found = rs(given, weight, 3, [], ttnn.CoreCoord(0, 6), cluster_axis=axis)
    near(product, x @ w, dtype, 2)
    near(found, x @ w, dtype, 2)
    placed(found, grid, axis, S(3))
    base, gate = numbers(1, 1, 8, 12, seed=2), numbers(1, 1, 8, 12, seed=3)
    added, factor = (cut(each, grid, axis, S(3), dtype) for each in (base, gate))
    _, fused = rs(
        given,
        weight,
        3,
        [],
        ttnn.CoreCoord(0, 6),
        cluster_axis=axis,
        fused_ternary_scalar=2.0,
        addcmul_input_tensor1=added,
        addcmul_input_tensor2=factor,
    )
    near(fused, base + 2 * (x @ w) * gate, dtype, 2)


@dtypes
def test_a_product_is_added_to_a_residual_through_a_gate(dtype: Any) -> None:
    x, w, bias = numbers(1, 1, 6, 8), numbers(8, 12, seed=1), numbers(1, 12, seed=2)
    base, gate = numbers(1, 1, 6, 12, seed=3), numbers(1, 1, 1, 12, seed=4)
    for grid, placement, out in (((1, 1), R, R), ((2,), S(2), S(2))):
        axis = len(grid) - 1
        given, first = (cut(each, grid, axis, placement, dtype) for each in (x, base))
        weight, added, factor = (cut(each, grid, axis, R, dtype) for each in (w, bias, gate))
        found = EXPERIMENTAL.dit_minimal_matmul_addcmul_fused(given, weight, 0.5, first, factor, added)
        near(found, base + 0.5 * (x @ w + bias) * gate, dtype)
        assert found.dtype is dtype and label(found)[-1] == out


@grids
def test_a_product_runs_beside_a_reduce_scatter(grid: Any, axis: int) -> None:
    x, w, other = numbers(1, 1, 4, 8), numbers(8, 12, seed=1), numbers(1, 1, 4, 8, seed=2)
    given, weight = cut(x, grid, axis, S(3)), cut(w, grid, axis, S(0))
    terms = cut(other, grid, axis, P())
    rs = EXPERIMENTAL.llama_rs_matmul
    product, scattered = rs(given, weight, None, 3, None, axis, mesh(grid), rs_tensor=terms)
    near(product, x @ w, ttnn.float32)
    near(scattered, other, ttnn.float32)
    placed(scattered, grid, axis, S(3))
    first, second, summed = rs(given, weight, None, 3, None, axis, mesh(grid), second_weight_tensor=weight)
    near(first, x @ w, ttnn.float32)
    near(second, x @ w, ttnn.float32)
    near(summed, x @ w, ttnn.float32)


# heads


@dtypes
@grids
def test_sums_are_split_into_heads(grid: Any, axis: int, dtype: Any) -> None:
    users, width = 8, 6 * 4
    x = numbers(1, 1, users, width)
    terms = cut(x, grid, axis, P(), dtype)
    q, k, v = EXPERIMENTAL.llama_rs_create_heads(
        terms, None, 2, None, None, axis, mesh(grid), ttnn.Topology.Linear, num_heads=4, num_kv_heads=1
    )
    heads = x.reshape(1, users, 6, 4)
    for found, want in ((q, heads[:, :, :4]), (k, heads[:, :, 4:5]), (v, heads[:, :, 5:])):
        near(found, want, dtype, 2)
        placed(found, grid, axis, S(1))
    offset = cut(torch.tensor([2.0]), grid, axis, R)
    offset.dtype, offset._block = ttnn.int32, offset.block.int()
    summed, *parts = EXPERIMENTAL.all_reduce_create_qkv_heads(
        terms, None, offset, axis, mesh(grid), None, 4, num_kv_heads=1, slice_size=4
    )
    near(summed, x, dtype, 2)
    for found, want in zip(parts, (heads[:, 2:6, :4], heads[:, 2:6, 4:5], heads[:, 2:6, 5:]), strict=True):
        near(found, want, dtype, 2)


@grids
def test_heads_of_all_users_are_gathered_and_joined(grid: Any, axis: int) -> None:
    x = numbers(1, 8, 4, 6)
    given = cut(x, grid, axis, S(1))
    found = EXPERIMENTAL.all_gather_concat(given, None, 1, axis, mesh(grid), None, 3, ttnn.L1_MEMORY_CONFIG)
    near(found, F.pad(x[:, :, :3].reshape(1, 1, 8, 18), (0, 0, 0, 24)), ttnn.float32)
    placed(found, grid, axis, R)
    assert found.memory_config() == ttnn.L1_MEMORY_CONFIG


# norms


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + turned * sin


def turning(size: int) -> torch.Tensor:
    """The matrix that turns neighbours: (a, b) becomes (-b, a)."""
    found = torch.zeros(size, size)
    for at in range(0, size, 2):
        found[at + 1, at], found[at, at + 1] = -1, 1
    return found


@dtypes
@grids
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_over_a_group_are_those_of_whole_rows(grid: Any, axis: int, dtype: Any, kind: str) -> None:
    x, w = numbers(1, 1, 6, 32) + 0.3, numbers(1, 32, seed=1) + 1
    given, weight = cut(x, grid, axis, S(3), dtype), cut(w, grid, axis, S(1), dtype)
    normalise = getattr(EXPERIMENTAL, f"dit_fused_distributed_{kind}")
    want = F.rms_norm(x, (32,), w[0], 1e-5) if kind == "rmsnorm" else F.layer_norm(x, (32,), w[0], eps=1e-5)
    room = getattr(EXPERIMENTAL, f"dit_fused_distributed_{kind}_create_stats_buffer")(given, axis, mesh(grid))
    assert (room is None) == (grid[axis] == 1)
    found = normalise(given, axis, mesh(grid), [], weight=weight, persistent_output_buffer=room)
    near(found, want, dtype)
    placed(found, grid, axis, S(3))
    heads = 8 // grid[axis]
    cos, sin = numbers(1, 1, 6, 4, seed=2), numbers(1, 1, 6, 4, seed=3)
    angles = {
        "transformation_mat": cut(turning(4)[None, None], grid, axis, R, dtype),
        "rope_cos": cut(cos, grid, axis, R, dtype),
        "rope_sin": cut(sin, grid, axis, R, dtype),
    }
    if heads > 1:
        turned = normalise(given, axis, mesh(grid), [], weight=weight, num_heads_per_device=heads, **angles)
        split = want.reshape(6, 8, 4).transpose(0, 1)[None]
        near(turned, rope(split, cos, sin), dtype)
        placed(turned, grid, axis, S(1))
    if kind == "rmsnorm":
        own = normalise(given, axis, mesh(grid), [], num_heads_per_device=heads, per_head_norm=True)
        near(own, F.rms_norm(x.reshape(6, 8, 4).transpose(0, 1)[None], (4,), None, 1e-5), dtype)
        with pytest.raises(UnsupportedError, match="affine_tile_row_map"):
            normalise(given, axis, mesh(grid), [], affine_tile_row_map=given)


@dtypes
@grids
def test_a_residual_becomes_the_sum_that_is_normalised(grid: Any, axis: int, dtype: Any) -> None:
    x, residual, w = numbers(1, 1, 4, 16), numbers(1, 1, 4, 16, seed=1), numbers(1, 16, seed=2) + 1
    given, kept = cut(x, grid, axis, S(3), dtype), cut(residual, grid, axis, S(3), dtype)
    weight = cut(w, grid, axis, S(1), dtype)
    config = ttnn.LayerNormDefaultProgramConfig()
    found = ttnn.fused_rms_minimal(
        given, config, axis, mesh(grid), None, residual_input_tensor=kept, epsilon=1e-5, weight=weight
    )
    near(found, F.rms_norm(x + residual, (16,), w[0], 1e-5), dtype)
    near(kept, x + residual, dtype)
    placed(found, grid, axis, S(3))


@dtypes
@grids
def test_group_norm_over_a_group_is_that_of_all_places(grid: Any, axis: int, dtype: Any) -> None:
    x, w, b = numbers(2, 1, 8, 6) + 0.2, numbers(1, 6, seed=1) + 1, numbers(1, 6, seed=2)
    given = cut(x, grid, axis, S(2), dtype)
    weight, bias = (cut(each, grid, axis, R, dtype) for each in (w, b))
    found = EXPERIMENTAL.dit_fused_distributed_groupnorm(
        given,
        num_groups=3,
        cluster_axis=axis,
        mesh_device=mesh(grid),
        multi_device_global_semaphore=[],
        weight=weight,
        bias=bias,
        activation="silu",
    )
    pictures = x.permute(0, 3, 1, 2)
    near(found, F.silu(F.group_norm(pictures, 3, w[0], b[0], 1e-5)).permute(0, 2, 3, 1), dtype)
    placed(found, grid, axis, S(2))
    room = EXPERIMENTAL.dit_fused_distributed_groupnorm_create_stats_buffer(given, 3, axis, mesh(grid))
    assert (room is None) == (grid[axis] == 1)
    with pytest.raises(OperandError, match="4 equal groups"):
        EXPERIMENTAL.dit_fused_distributed_groupnorm(
            given, num_groups=4, cluster_axis=axis, mesh_device=mesh(grid), multi_device_global_semaphore=[]
        )


@dtypes
@grids
def test_statistics_gathered_by_the_program_give_the_norm_of_whole_rows(grid: Any, axis: int, dtype: Any) -> None:
    x, w, b = numbers(1, 1, 6, 16) + 0.3, numbers(1, 16, seed=1) + 1, numbers(1, 16, seed=2)
    given, weight, bias = (
        cut(x, grid, axis, S(3), dtype),
        cut(w, grid, axis, S(1), dtype),
        cut(b, grid, axis, S(1), dtype),
    )
    own = EXPERIMENTAL.wan_fused_rmsnorm_pre_allgather(given, dtype=ttnn.float32)
    with ttnn.strictness("lenient"):  # one device gathers too
        stats = ttnn.all_gather(own, 3, cluster_axis=axis)
    found = EXPERIMENTAL.wan_fused_rmsnorm_post_allgather(given, stats, weight=weight)
    near(found, F.rms_norm(x, (16,), w[0], 1e-5), dtype)
    heads = EXPERIMENTAL.wan_fused_rmsnorm_post_allgather(
        given, stats, weight=weight, num_heads_per_device=8 // grid[axis], dtype=ttnn.float32
    )
    near(heads, F.rms_norm(x, (16,), w[0], 1e-5).reshape(6, 8, 2).transpose(0, 1)[None], dtype)
    assert heads.dtype is ttnn.float32
    own = EXPERIMENTAL.dit_layernorm_pre_allgather(given, given, dtype=ttnn.float32)
    with ttnn.strictness("lenient"):  # one device gathers too
        stats = ttnn.all_gather(own, 3, cluster_axis=axis)
    found = EXPERIMENTAL.dit_layernorm_post_allgather(given, stats, weight=weight, bias=bias)
    near(found, F.layer_norm(x, (16,), w[0], b[0], 1e-5), dtype)
    placed(found, grid, axis, S(3))


@dtypes
def test_a_norm_is_followed_by_an_activation(dtype: Any) -> None:
    x, w, residual = numbers(1, 1, 6, 16), numbers(1, 16, seed=1), numbers(1, 1, 6, 16, seed=2)
    for grid, placement in (((1, 1), R), ((2,), S(2))):
        given, added = (cut(each, grid, len(grid) - 1, placement, dtype) for each in (x, residual))
        weight = cut(w, grid, 0, R, dtype)
        found = EXPERIMENTAL.dit_rms_norm_unary_fused(given, 1e-5, weight, None, added, activation="silu")
        near(found, F.silu(F.rms_norm(x + residual, (16,), w[0], 1e-5)), dtype)
        assert found.dtype is dtype and label(found)[-1] == placement


# attention


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


@dtypes
@grids
@pytest.mark.parametrize("name", ["ring_joint", "exp_ring_joint"])
def test_attention_round_a_ring_sees_all_keys_and_the_joint_ones(grid: Any, axis: int, dtype: Any, name: str) -> None:
    q, k, v = numbers(2, 4, 8, 6), numbers(2, 2, 8, 6, seed=1), numbers(2, 2, 8, 6, seed=2)
    joint = numbers(2, 4, 3, 6, seed=3), numbers(2, 2, 3, 6, seed=4), numbers(2, 2, 3, 6, seed=5)
    call = getattr(ttnn.transformer, f"{name}_scaled_dot_product_attention")
    given = [cut(each, grid, axis, S(2), dtype) for each in (q, k, v)]
    second = [cut(each, grid, axis, R, dtype) for each in joint]
    rooms = [cut(torch.zeros(2, 2, 8, 6), grid, axis, R, dtype) for _ in range(2)]
    how = {
        "persistent_output_buffer_k": rooms[0],
        "persistent_output_buffer_v": rooms[1],
        "joint_strategy": "rear",
        "logical_n": 7,
        "program_config": ttnn.SDPAProgramConfig(
            compute_with_storage_grid_size=(8, 8), q_chunk_size=32, k_chunk_size=32
        ),
        "dim": 2,
        "multi_device_global_semaphore": [],
        "num_links": 1,
        "cluster_axis": axis,
        "mesh_device": mesh(grid),
        "topology": ttnn.Topology.Linear,
    }
    if name == "ring_joint":
        how["ccl_core_grid_offset"] = ttnn.CoreCoord(0, 6)
    found, beside, sums = call(*given, *second, **how)
    keys, values = torch.cat([k[:, :, :7], joint[1]], 2), torch.cat([v[:, :, :7], joint[2]], 2)
    near(found, attention(q, keys, values), dtype)
    placed(found, grid, axis, S(2))
    near(beside, attention(joint[0], keys, values), dtype)
    placed(beside, grid, axis, R)
    near(rooms[0], k, dtype)
    assert sums.shape == [2, 4, 8 // grid[axis] + 3, 1]
    alone, nothing, sums = call(*given, **how)
    near(alone, attention(q, k[:, :, :7], v[:, :, :7]), dtype)
    logits = q @ k[:, :, :7].repeat_interleave(2, 1).transpose(-1, -2) / 6**0.5
    near(sums, logits.logsumexp(-1, keepdim=True), dtype)
    assert nothing is None
    if name == "ring_joint":
        causal, _, _ = call(*given, **{**how, "logical_n": 8}, is_causal=True)
        near(causal, attention(q, k, v, causal=True), dtype)
        with pytest.raises(UnsupportedError, match="is_balanced not covered"):
            call(*given, **how, is_balanced=True)
    with pytest.raises(OperandError, match="logical_n=9 of 8 keys"):
        call(*given, **{**how, "logical_n": 9})


@dtypes
@grids
def test_a_ring_shares_causal_attention_out_from_both_ends(grid: Any, axis: int, dtype: Any) -> None:
    q, k, v = numbers(1, 4, 16, 6), numbers(1, 2, 16, 6, seed=1), numbers(1, 2, 16, 6, seed=2)
    given = [cut(each, grid, axis, R, dtype) for each in (q, k, v)]
    size = grid[axis]
    found = ttnn.transformer.ring_distributed_scaled_dot_product_attention(*given, size)
    chunks = attention(q, k, v, causal=True).chunk(2 * size, 2)
    ring = max(each for each, length in enumerate(grid) if length == size)
    for place, part in held(found).items():
        want = torch.cat([chunks[place[ring]], chunks[2 * size - 1 - place[ring]]], 2)
        torch.testing.assert_close(part.float(), want, rtol=3e-2, atol=1e-5 if dtype is ttnn.float32 else 3e-2)
    told = ttnn.transformer.ring_distributed_scaled_dot_product_attention(*given, size, size - 1)
    near(told, torch.cat([chunks[size - 1], chunks[size]], 2), dtype)
    with pytest.raises(OperandError, match=r"has 7 devices|in 14 chunks"):
        ttnn.transformer.ring_distributed_scaled_dot_product_attention(*given, 7)


# tokens


@dtypes
@pytest.mark.parametrize(("grid", "axis"), [((1, 1), 1), ((1, 4), 1), ((2, 2), 0)], ids=str)
def test_tokens_go_to_their_experts_with_scores_and_to_shared_ones(grid: Any, axis: int, dtype: Any) -> None:
    devices, size = grid[0] * grid[1], grid[axis]
    experts = 2 * devices
    tokens, chosen = (
        numbers(4, 1, 3, 6),
        torch.randint(0, experts, (4, 1, 3, 2), generator=torch.Generator().manual_seed(1)),
    )
    scores = numbers(4, 1, 3, 2, seed=2)
    table = torch.zeros(1, 1, experts, devices)
    table[0, 0, torch.arange(experts), torch.arange(experts) // 2] = 1
    given = [
        cut(tokens, grid, axis, S(0), dtype),
        cut(chosen.float(), grid, axis, S(0)),
        cut(scores, grid, axis, S(0), dtype),
    ]
    given[1].dtype, given[1]._block = ttnn.int32, given[1].block.int()
    mapping = cut(table, grid, axis, R)
    rows, numbers_of, weights = EXPERIMENTAL.all_to_all_dispatch_metadata(*given, mapping, cluster_axis=axis)
    near(numbers_of, chosen.reshape(1, 4, 3, 2), ttnn.float32)
    near(weights, scores.reshape(1, 4, 3, 2), dtype)
    for place, part in held(rows).items():
        device = place[0] * grid[1] + place[1]
        mine = (chosen.reshape(4, 3, 2) // 2 == device).any(-1)[..., None]
        torch.testing.assert_close(
            part[0].float(), torch.where(mine, tokens.reshape(4, 3, 6), 0).to(dtype.store).float()
        )
    every = EXPERIMENTAL.all_to_all_dispatch_metadata(*given, mapping, cluster_axis=axis, shared_expert_ids=[0])[0]
    torch.testing.assert_close(held(every)[(0, 0)][0].float(), tokens.reshape(4, 3, 6).to(dtype.store).float())
    assert size == 1 or label(rows) != label(weights)
