"""Heads, rotary embedding, attention, caches and sampling against torch, device by device, and step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

from meshloom import ttnn
from meshloom.errors import OperandError
from ttnn_draws import UNKNOWN, P, R, S, alike_for, placements_for, planes
from ttnn_meshes import mesh_of
from ttnn_parts import NoWhole, check_each, check_whole, convolve, distributed, of_block, part, places, random_tensor

LIGHT = settings(max_examples=15, deadline=None)


def attention(q: Any, k: Any, v: Any, seen: Any = None, bias: Any = None, scale: Any = None, sink: Any = None) -> Any:
    """softmax(q @ k.T) @ v, written out: heads are repeated, a sink is one more logit that has no value."""
    k, v = (each.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for each in (k, v))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    logits = q @ k.transpose(-1, -2)
    logits = logits * factor + (0 if bias is None else bias)
    if seen is not None:
        logits = torch.where(seen, logits, torch.tensor(-1e30))
    if sink is not None:
        logits = torch.cat([logits, (sink * factor).expand(*logits.shape[:-1], 1)], -1)
    weights = logits.softmax(-1)[..., : k.shape[-2]]
    return weights @ v


# heads


@given(data=st.data())
@LIGHT
def test_heads_are_split_and_put_together_as_torch_views_them(data: st.DataObject) -> None:
    grid, q_heads, kv_heads, size = data.draw(planes), 4, data.draw(st.sampled_from([1, 2, 4])), 3
    with mesh_of(grid) as mesh:
        x = random_tensor(mesh, (2, 1, 5, (q_heads + 2 * kv_heads) * size), data.draw(alike_for(grid)))
        turned = data.draw(st.booleans())
        made = ttnn.experimental.nlp_create_qkv_heads(
            x, num_heads=q_heads, num_kv_heads=kv_heads, transpose_k_heads=turned
        )
        bounds = [0, q_heads * size, (q_heads + kv_heads) * size, (q_heads + 2 * kv_heads) * size]
        for number, found in enumerate(made):

            def one(p: torch.Tensor, number: int = number) -> torch.Tensor:
                heads = p[:, 0, :, bounds[number] : bounds[number + 1]].unflatten(-1, (-1, size)).transpose(1, 2)
                return heads.transpose(-1, -2) if turned and number == 1 else heads

            check_each(found, one, x)
        together = ttnn.experimental.nlp_concat_heads(made[0])
        check_each(together, lambda p: p[..., : q_heads * size], x)
        rows = ttnn.transformer.concatenate_heads(made[0])
        check_each(rows, lambda p: p[:, 0, :, : q_heads * size], x)


def test_split_query_key_value_gives_the_shapes_of_the_original() -> None:
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (1, 64, 768), [True, False], ttnn.bfloat16, ttnn.TILE_LAYOUT)
        q, k, v = ttnn.transformer.split_query_key_value_and_split_heads(x, num_heads=4)
        assert [list(t.shape) for t in (q, k, v)] == [[1, 4, 64, 64]] * 3
        check_each(k, lambda p: p[..., 256:512].unflatten(-1, (4, 64)).permute(0, 2, 3, 1), x)
        assert ttnn.transformer.concatenate_heads(q).shape == [1, 64, 256]
        with pytest.raises(OperandError, match="does not divide into 15 heads"):
            ttnn.transformer.split_query_key_value_and_split_heads(x, num_heads=5)


@given(data=st.data())
@LIGHT
def test_heads_of_one_token_are_laid_out_by_user(data: st.DataObject) -> None:
    grid = data.draw(planes)
    with mesh_of(grid) as mesh:
        x = random_tensor(mesh, (1, 1, 3, 8 * 5), data.draw(alike_for(grid)))
        q, k, v = ttnn.experimental.nlp_create_qkv_heads_decode(x, num_heads=4, num_kv_heads=2)
        for found, first, last in ((q, 0, 4), (k, 4, 6), (v, 6, 8)):
            check_each(found, lambda p, a=first, b=last: p[0].unflatten(-1, (8, 5))[:, :, a:b], x)
        joined = ttnn.experimental.nlp_concat_heads_decode(q, num_heads=3)  # heads beyond those asked for are padding
        check_each(joined, lambda p: F.pad(p[..., : 3 * 5], (0, 0, 0, 32 - 3)), x)
        offset = of_block(mesh, torch.tensor([1])[(None,) * len(grid)], [R] * len(grid))
        some = ttnn.experimental.nlp_create_qkv_heads_decode(
            x, num_heads=4, num_kv_heads=2, batch_offset=offset, slice_size=2
        )
        check_each(some[0], lambda p: p[0, :, 1:].unflatten(-1, (8, 5))[:, :, :4], x)


def test_a_cut_of_the_hidden_width_becomes_a_cut_of_heads_and_back() -> None:
    with mesh_of((2, 2)) as mesh:
        x = of_block(mesh, torch.randn(2, 2, 2, 1, 5, 3 * 2 * 4), [S(0), S(3)])
        q, k, v = ttnn.experimental.nlp_create_qkv_heads(x, num_heads=2)
        assert [t.tensor_topology().placements() for t in (q, k, v)] == [[S(0), S(1)]] * 3
        assert ttnn.experimental.nlp_concat_heads(q).tensor_topology().placements() == [S(0), S(3)]
        assert ttnn.transformer.concatenate_heads(q).tensor_topology().placements() == [S(0), S(2)]
        tokens = of_block(mesh, torch.randn(2, 2, 1, 1, 3, 3 * 2 * 4), [S(2), S(3)])
        heads = ttnn.experimental.nlp_create_qkv_heads_decode(tokens, num_heads=2)
        assert [t.tensor_topology().placements() for t in heads] == [[S(1), S(2)]] * 3
        again = ttnn.experimental.nlp_concat_heads_decode(heads[0], num_heads=2)
        assert again.tensor_topology().placements() == [S(2), S(3)]


@given(data=st.data())
@LIGHT
def test_labels_of_heads_put_together_make_up_the_op_on_wholes(data: st.DataObject) -> None:
    grid = data.draw(planes)
    placements = data.draw(placements_for(grid, [0, 1, 2]))
    whole = torch.randn(12, 12, 12, 3)
    with mesh_of(grid) as mesh:
        x = distributed(mesh, whole, placements)
        check_whole(ttnn.experimental.nlp_concat_heads(x), whole.transpose(1, 2).flatten(2).unsqueeze(1))


# rotary embedding


def turned_by_complex(x: torch.Tensor, angles: torch.Tensor, neighbours: bool) -> torch.Tensor:
    """Rotary embedding as multiplication of complex numbers: pairs are neighbours, or the two halves."""
    pairs = x.unflatten(-1, (-1, 2)) if neighbours else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    numbers = torch.view_as_complex(pairs.contiguous().double())
    turned = torch.view_as_real(numbers * torch.polar(torch.ones_like(angles).double(), angles.double()))
    return (turned.flatten(-2) if neighbours else turned.transpose(-1, -2).flatten(-2)).float()


def angles_of(positions: int, size: int) -> torch.Tensor:
    return torch.arange(positions)[:, None] * (10000.0 ** (-torch.arange(0, size, 2) / size))


def neighbour_matrix() -> torch.Tensor:
    matrix = torch.zeros(1, 1, 32, 32)
    for i in range(0, 32, 2):
        matrix[..., i, i + 1], matrix[..., i + 1, i] = 1, -1
    return matrix


def everywhere(mesh: Any, values: torch.Tensor, dtype: Any = None) -> Any:
    return of_block(mesh, values[(None,) * len(tuple(mesh.shape))], [R] * len(tuple(mesh.shape)), dtype)


@given(data=st.data())
@LIGHT
def test_rotary_embedding_of_halves_is_a_complex_product(data: st.DataObject) -> None:
    grid = data.draw(planes)
    with mesh_of(grid) as mesh:
        x = random_tensor(mesh, (2, 3, 5, 8), data.draw(alike_for(grid)))
        angles = angles_of(9, 8)
        cos, sin = (everywhere(mesh, f(angles).repeat(1, 2)[None, None]) for f in (torch.cos, torch.sin))
        found = ttnn.experimental.rotary_embedding(x, cos, sin)
        check_each(found, lambda p: turned_by_complex(p, angles[:5], False), x, close=1e-5)
        assert found.block.shape[: len(grid)] == x.block.shape[: len(grid)]
        at = ttnn.experimental.rotary_embedding(x, cos, sin, 7)
        check_each(at, lambda p: turned_by_complex(p, angles[7:8], False), x, close=1e-5)
        whole = ttnn.experimental.rotary_embedding_hf(x, cos, sin)
        assert torch.equal(whole.block, found.block)


@given(data=st.data())
@LIGHT
def test_rotary_embedding_by_a_matrix_is_a_complex_product_of_neighbours(data: st.DataObject) -> None:
    grid = data.draw(planes)
    with mesh_of(grid) as mesh:
        angles = angles_of(9, 64)
        cos, sin = (f(angles).repeat_interleave(2, -1)[None, None] for f in (torch.cos, torch.sin))
        matrix = everywhere(mesh, neighbour_matrix())
        x = random_tensor(mesh, (1, 3, 5, 64), data.draw(alike_for(grid)))
        found = ttnn.experimental.rotary_embedding_llama(x, everywhere(mesh, cos), everywhere(mesh, sin), matrix)
        check_each(found, lambda p: turned_by_complex(p, angles[:5], True), x, close=1e-5)
        positions = [4, 0, 8]
        by_user = [everywhere(mesh, each[0, 0, positions][None, :, None]) for each in (cos, sin)]
        tokens = random_tensor(mesh, (1, 3, 4, 64), data.draw(alike_for(grid)))
        repeated = everywhere(mesh, neighbour_matrix().repeat(1, 1, 3, 1))
        made = ttnn.experimental.rotary_embedding_llama(tokens, *by_user, repeated, is_decode_mode=True)

        def one(p: torch.Tensor) -> torch.Tensor:
            rows = [turned_by_complex(p[0, u], angles[at : at + 1], True) for u, at in enumerate(positions)]
            return torch.stack(rows)[None]

        check_each(made, one, tokens, close=1e-5)
        keys = random_tensor(mesh, (1, 3, 2, 64), data.draw(alike_for(grid)))
        q, k = ttnn.experimental.rotary_embedding_llama_fused_qk(tokens, keys, *by_user, repeated)
        assert torch.equal(q.block, made.block)
        check_each(k, one, keys, close=1e-5)


def test_the_rotary_oracle_tells_halves_from_neighbours() -> None:
    x, angles = torch.randn(1, 1, 5, 8), angles_of(5, 8)
    assert not torch.allclose(turned_by_complex(x, angles, True), turned_by_complex(x, angles, False))


def test_rotation_of_terms_and_of_cut_heads_is_labelled() -> None:
    with mesh_of((2, 2)) as mesh:
        angles = angles_of(4, 8)
        cos, sin = (f(angles).repeat(1, 2)[None, None] for f in (torch.cos, torch.sin))
        whole = torch.randn(2, 4, 4, 8)
        for placements in ([R, S(1)], [S(0), S(1)], [P("sum"), S(1)]):
            x = distributed(mesh, whole, placements)
            found = ttnn.experimental.rotary_embedding(x, everywhere(mesh, cos), everywhere(mesh, sin))
            check_whole(found, turned_by_complex(whole, angles, False), close=1e-5)


# attention over whole sequences


@given(data=st.data())
@LIGHT
def test_attention_is_softmax_of_products(data: st.DataObject) -> None:
    grid, kv_heads = data.draw(planes), data.draw(st.sampled_from([1, 2, 4]))
    with mesh_of(grid) as mesh:
        q = random_tensor(mesh, (2, 4, 6, 5), data.draw(alike_for(grid)))
        k, v = (random_tensor(mesh, (2, kv_heads, 6, 5), data.draw(alike_for(grid))) for _ in range(2))
        below = torch.ones(6, 6, dtype=torch.bool).tril()
        sdpa = ttnn.transformer.scaled_dot_product_attention
        check_each(sdpa(q, k, v), lambda *p: attention(*p, seen=below), q, k, v, close=1e-5)
        check_each(sdpa(q, k, v, is_causal=False, scale=0.3), lambda *p: attention(*p, scale=0.3), q, k, v, close=1e-5)
        near = below & ~below.tril(-3)
        check_each(sdpa(q, k, v, sliding_window_size=3), lambda *p: attention(*p, seen=near), q, k, v, close=1e-5)
        mask = random_tensor(mesh, (2, 1, 6, 6), data.draw(alike_for(grid)))
        check_each(
            sdpa(q, k, v, is_causal=False, attn_mask=mask),
            lambda a, b, c, m: attention(a, b, c, bias=m),
            *(q, k, v, mask),
            close=1e-5,
        )
        sink = random_tensor(mesh, (1, 4, 1, 1), data.draw(alike_for(grid)))
        check_each(
            sdpa(q, k, v, attention_sink=sink),
            lambda a, b, c, s: attention(a, b, c, seen=below, sink=s),
            *(q, k, v, sink),
            close=1e-5,
        )


def test_attention_agrees_with_torch_and_the_oracle_can_fail() -> None:
    with mesh_of((1, 2)) as mesh:
        q, k, v = (random_tensor(mesh, (1, 2, 8, 4), [True, False]) for _ in range(3))
        found = ttnn.transformer.scaled_dot_product_attention(q, k, v)
        check_each(found, lambda *p: F.scaled_dot_product_attention(*p, is_causal=True), q, k, v, close=1e-5)
        with pytest.raises(AssertionError):
            check_each(found, lambda *p: F.scaled_dot_product_attention(*p), q, k, v, close=1e-5)


def test_windows_see_only_themselves() -> None:
    with mesh_of((1, 2)) as mesh:
        q, k, v = (random_tensor(mesh, (1, 2, 7, 4), [True, False]) for _ in range(3))
        bounds = everywhere(mesh, torch.tensor([0, 3, 7]), ttnn.int32)
        found = ttnn.transformer.scaled_dot_product_attention(q, k, v, is_causal=False, cu_window_seqlens=bounds)

        def one(*p: torch.Tensor) -> torch.Tensor:
            return torch.cat([attention(*(x[:, :, a:b] for x in p)) for a, b in ((0, 3), (3, 7))], 2)

        check_each(found, one, q, k, v, close=1e-5)
        flat = ttnn.transformer.scaled_dot_product_attention(
            q, k, v, is_causal=False, cu_window_seqlens=bounds, output_concat_heads=True
        )
        assert flat.shape == [1, 1, 7, 8]


def test_joint_attention_is_attention_of_both_sequences() -> None:
    with mesh_of((1, 2)) as mesh:
        first, second = ([random_tensor(mesh, (1, 2, n, 4), [True, False]) for _ in range(3)] for n in (5, 3))
        a, b = ttnn.transformer.joint_scaled_dot_product_attention(*first, *second, joint_strategy="rear")

        def both(*p: torch.Tensor) -> torch.Tensor:
            return attention(*(torch.cat(pair, 2) for pair in zip(p[:3], p[3:], strict=True)))

        check_each(a, lambda *p: both(*p)[:, :, :5], *first, *second, close=1e-5)
        check_each(b, lambda *p: both(*p)[:, :, 5:], *first, *second, close=1e-5)


@given(data=st.data())
@LIGHT
def test_labels_of_attention_make_up_the_op_on_wholes(data: st.DataObject) -> None:
    grid = data.draw(planes)
    ways = [data.draw(placements_for(grid, [0, 1])) for _ in range(2)]
    way = ways[data.draw(st.integers(0, 1))]
    wholes = [torch.randn(12, 12, 4, 3) for _ in range(3)]
    with mesh_of(grid) as mesh:
        q, k, v = (distributed(mesh, w, p) for w, p in zip(wholes, (ways[0], ways[0], way), strict=True))
        try:
            found = ttnn.transformer.scaled_dot_product_attention(q, k, v)
        except OperandError:  # parts that do not go together
            assert ways[0] != way
            return
        try:
            check_whole(found, F.scaled_dot_product_attention(*wholes, is_causal=True), close=1e-5)
        except NoWhole:
            assert P("sum") in ways[0] or ways[0] != way


def test_cuts_of_keys_make_no_whole_and_cuts_of_values_do() -> None:
    with mesh_of((1, 2)) as mesh:
        q = everywhere(mesh, torch.randn(1, 2, 4, 6))
        k, v = torch.randn(1, 2, 8, 6), torch.randn(1, 2, 8, 6)
        sdpa = ttnn.transformer.scaled_dot_product_attention
        cut = sdpa(q, distributed(mesh, k, [R, S(2)]), distributed(mesh, v, [R, S(2)]), is_causal=False)
        assert cut.tensor_topology().placements() == [R, UNKNOWN]
        wide = sdpa(q, everywhere(mesh, k), distributed(mesh, v, [R, S(3)]), is_causal=False)
        check_whole(wide, attention(q.block[0, 0], k, v), close=1e-5)
        terms = sdpa(q, everywhere(mesh, k), distributed(mesh, v, [R, P("sum")]), is_causal=False)
        check_whole(terms, attention(q.block[0, 0], k, v), close=1e-5)
        rows = distributed(mesh, torch.randn(1, 2, 8, 6), [R, S(2)])
        assert sdpa(rows, everywhere(mesh, k), everywhere(mesh, v), is_causal=False).tensor_topology().placements() == [
            R,
            S(2),
        ]


def test_what_differs_beside_queries_makes_results_differ() -> None:
    """A sink, a mask or positions that are cut where queries are not: devices no longer hold the same."""
    with mesh_of((1, 2)) as mesh:
        x = everywhere(mesh, torch.randn(1, 2, 4, 6))
        sink = of_block(mesh, torch.randn(1, 2, 1, 2, 1, 1), [R, S(1)])
        mask = of_block(mesh, torch.randn(1, 2, 1, 1, 4, 4), [R, UNKNOWN])
        sdpa = ttnn.transformer.scaled_dot_product_attention
        assert sdpa(x, x, x, attention_sink=sink).tensor_topology().placements() == [R, UNKNOWN]
        assert sdpa(x, x, x, is_causal=False, attn_mask=mask).tensor_topology().placements() == [R, UNKNOWN]
        token, at = everywhere(mesh, torch.randn(1, 1, 2, 6)), of_block(mesh, torch.tensor([[[1], [3]]]), [R, S(0)])
        found = ttnn.transformer.scaled_dot_product_attention_decode(token, x, x, cur_pos_tensor=at)
        assert found.tensor_topology().placements() == [R, UNKNOWN]


def test_attention_that_makes_no_sense_is_refused() -> None:
    with mesh_of((1, 2)) as mesh:
        q, k = (random_tensor(mesh, (1, heads, 4, 6), [True, True]) for heads in (4, 3))
        sdpa = ttnn.transformer.scaled_dot_product_attention
        with pytest.raises(OperandError, match="4 query heads do not divide among 3 key heads"):
            sdpa(q, k, k)
        with pytest.raises(OperandError, match="exclude each other"):
            sdpa(q, q, q, attn_mask=random_tensor(mesh, (1, 1, 4, 4), [True, True]))
        longer = random_tensor(mesh, (1, 4, 8, 6), [True, True])
        with pytest.raises(OperandError, match="causal attention of 4 queries over 8 keys"):
            sdpa(q, longer, longer)


# attention of one token


@given(data=st.data())
@LIGHT
def test_decoding_sees_the_cache_up_to_its_own_position(data: st.DataObject) -> None:
    grid, kv_heads = data.draw(planes), data.draw(st.sampled_from([1, 2, 4]))
    window = data.draw(st.sampled_from([None, 3]))
    with mesh_of(grid) as mesh:
        q = random_tensor(mesh, (1, 3, 4, 5), data.draw(alike_for(grid)))
        k, v = (random_tensor(mesh, (3, kv_heads, 8, 5), data.draw(alike_for(grid))) for _ in range(2))
        positions = random_tensor(mesh, (3,), data.draw(alike_for(grid)), ttnn.int32, high=8)
        positions.block[..., 1] = -1
        sink = random_tensor(mesh, (4, 32), data.draw(alike_for(grid)))
        decode = ttnn.transformer.scaled_dot_product_attention_decode

        def one(*p: torch.Tensor) -> torch.Tensor:
            a, b, c, at, *rest = p
            rows = []
            for user, last in enumerate(at.tolist()):
                first = 0 if window is None else max(0, last + 1 - window)
                own = (x[user, :, first : last + 1] for x in (b, c))
                extra = rest[0][:, :1][:, None] if rest else None
                rows.append(attention(a[0, user][:, None], *own, sink=extra)[:, 0] if last >= 0 else torch.zeros(4, 5))
            return torch.stack(rows)[None]

        found = decode(q, k, v, cur_pos_tensor=positions, sliding_window_size=window)
        check_each(found, one, q, k, v, positions, close=1e-5)
        sunk = decode(q, k, v, cur_pos_tensor=positions, sliding_window_size=window, attention_sink=sink)
        check_each(sunk, one, q, k, v, positions, sink, close=1e-5)


def test_decoding_takes_a_list_of_positions_a_mask_and_a_shared_cache() -> None:
    with mesh_of((1, 2)) as mesh:
        q = random_tensor(mesh, (1, 2, 4, 5), [True, False])
        k, v = (random_tensor(mesh, (2, 2, 6, 5), [True, False]) for _ in range(2))
        decode = ttnn.transformer.scaled_dot_product_attention_decode
        found = decode(q, k, v, cur_pos=[5, 2])
        check_each(
            found,
            lambda a, b, c: torch.stack(
                [attention(a[0, u][:, None], b[u, :, :n], c[u, :, :n])[:, 0] for u, n in ((0, 6), (1, 3))]
            )[None],
            *(q, k, v),
            close=1e-5,
        )
        mask = random_tensor(mesh, (2, 1, 4, 6), [True, False])
        masked = decode(q, k, v, is_causal=False, attn_mask=mask)
        check_each(
            masked,
            lambda a, b, c, m: attention(a[0][:, :, None], b, c, bias=m.transpose(1, 2))[:, :, 0][None],
            *(q, k, v, mask),
            close=1e-5,
        )
        one_cache = [ttnn.slice(x, [0, 0, 0, 0], [1, 2, 6, 5]) for x in (k, v)]
        shared = decode(q, *one_cache, cur_pos=[5, 2], share_cache=True)
        check_each(
            shared,
            lambda a, b, c: torch.stack(
                [attention(a[0, u][:, None], b[0, :, :n], c[0, :, :n])[:, 0] for u, n in ((0, 6), (1, 3))]
            )[None],
            *(q, k, v),
            close=1e-5,
        )
        with pytest.raises(OperandError, match="1 positions for 2 users"):
            decode(q, k, v, cur_pos=[3])


def test_latent_attention_takes_its_values_from_its_keys() -> None:
    with mesh_of((1, 2)) as mesh:
        q = random_tensor(mesh, (1, 4, 6, 8), [True, False])
        k = random_tensor(mesh, (1, 1, 6, 8), [True, False])
        below = torch.ones(6, 6, dtype=torch.bool).tril()
        found = ttnn.transformer.flash_mla_prefill(q, k, 5)
        check_each(found, lambda a, b: attention(a, b, b[..., :5], seen=below), q, k, close=1e-5)
        tokens = random_tensor(mesh, (1, 1, 4, 8), [True, False])
        made = ttnn.transformer.flash_multi_latent_attention_decode(tokens, k, head_dim_v=5, cur_pos=[3])
        check_each(
            made,
            lambda a, b: attention(a[0, :, :, None], b[:, :, :4], b[:, :, :4, :5])[:, :, 0][None],
            *(tokens, k),
            close=1e-5,
        )


# pages


def _pages(mesh: Any, users: int, each: int, spare: int = 0) -> Any:
    """A table that gives every user pages in a random order, other ones on every device."""
    grid = tuple(mesh.shape)
    rows = [torch.randperm(users * each + spare)[: users * each].reshape(users, each) for _ in places(grid)]
    return of_block(mesh, torch.stack(rows).reshape(*grid, users, each), [UNKNOWN] * len(grid), ttnn.int32)


@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_a_paged_cache_decodes_as_a_dense_one_step_by_step(data: st.DataObject) -> None:
    grid, kv_heads = data.draw(planes), data.draw(st.sampled_from([1, 2]))
    users, page, count, size = 3, 4, 3, 5
    with mesh_of(grid) as mesh:
        axes = len(grid)
        table = _pages(mesh, users, count, spare=2)
        paged = [everywhere(mesh, torch.zeros(users * count + 2, kv_heads, page, size)) for _ in range(2)]
        dense = [everywhere(mesh, torch.zeros(users, kv_heads, page * count, size)) for _ in range(2)]
        addresses = [cache.buffer_address() for cache in (*paged, *dense)]
        position = everywhere(mesh, torch.tensor([0, 2, -1]), ttnn.int32)
        plain = {place: torch.zeros(2, users, kv_heads, page * count, size) for place in places(grid)}
        for _ in range(5):
            tokens = [random_tensor(mesh, (1, users, kv_heads, size), data.draw(alike_for(grid))) for _ in range(2)]
            for own, cache, token in zip((0, 1), paged, tokens, strict=True):
                assert (
                    ttnn.experimental.paged_update_cache(cache, token, update_idxs_tensor=position, page_table=table)
                    is cache
                )
                ttnn.experimental.paged_update_cache(dense[own], token, update_idxs_tensor=position)
                for place in places(grid):
                    for user, at in enumerate(position.block.flatten(axes)[(0,) * axes].tolist()):
                        if at >= 0:
                            plain[place][own, user, :, at] = part(token, place)[0, user]
            q = random_tensor(mesh, (1, users, 4, size), data.draw(alike_for(grid)))
            by_page = ttnn.transformer.paged_scaled_dot_product_attention_decode(
                q, *paged, table, cur_pos_tensor=position
            )
            straight = ttnn.transformer.scaled_dot_product_attention_decode(q, *dense, cur_pos_tensor=position)
            for place in places(grid):
                torch.testing.assert_close(part(by_page, place), part(straight, place))
                for own in range(2):
                    assert torch.equal(part(dense[own], place), plain[place][own])
            assert not part(straight, (0,) * axes)[0, 2].any()  # nobody at -1
            ttnn.plus_one(position, skip_negative_entries=True)
        assert [cache.buffer_address() for cache in (*paged, *dense)] == addresses
        assert position.block.flatten(axes)[(0,) * axes].tolist() == [5, 7, -1]


@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_a_prompt_in_pages_is_seen_by_chunks_as_a_whole(data: st.DataObject) -> None:
    grid = data.draw(planes)
    users, page, count, size, length = 2, 4, 3, 5, 11
    with mesh_of(grid) as mesh:
        table = _pages(mesh, users, count)
        caches = [everywhere(mesh, torch.zeros(users * count, 2, page, size)) for _ in range(2)]
        prompts = [
            [random_tensor(mesh, (1, 2, length, size), data.draw(alike_for(grid))) for _ in range(2)]
            for _ in range(users)
        ]
        for user, pair in enumerate(prompts):
            for cache, prompt in zip(caches, pair, strict=True):
                ttnn.experimental.paged_fill_cache(cache, prompt, table, batch_idx=user)
        q = random_tensor(mesh, (1, 4, length, size), data.draw(alike_for(grid)))
        whole = ttnn.transformer.scaled_dot_product_attention(q, *prompts[1])
        row = ttnn.slice(table, [1, 0], [2, count])
        for first, last in ((0, 4), (4, 11)):
            chunk = ttnn.slice(q, [0, 0, first, 0], [1, 4, last, size])
            found = ttnn.transformer.chunked_scaled_dot_product_attention(chunk, *caches, row, first)
            for place in places(grid):
                torch.testing.assert_close(part(found, place), part(whole, place)[:, :, first:last])
            told = everywhere(mesh, torch.tensor([first]), ttnn.int32)
            again = ttnn.transformer.chunked_scaled_dot_product_attention(
                chunk, *caches, row, chunk_start_idx_tensor=told
            )
            assert torch.equal(again.block, found.block)


def test_a_prompt_goes_to_the_user_that_a_tensor_names_and_only_as_far_as_it_is_valid() -> None:
    with mesh_of((1, 2)) as mesh:
        table = everywhere(mesh, torch.tensor([[0, 1], [3, 2]]), ttnn.int32)
        cache = everywhere(mesh, torch.zeros(4, 1, 2, 3))
        prompt = random_tensor(mesh, (1, 1, 4, 3), [True, False])
        users = of_block(mesh, torch.tensor([[[0], [1]]]), [R, S(0)])
        valid = everywhere(mesh, torch.tensor([3]), ttnn.int32)
        ttnn.experimental.paged_fill_cache(cache, prompt, table, batch_idx_tensor=users, valid_seq_len_tensor=valid)
        for place, pages in (((0, 0), (0, 1)), ((0, 1), (3, 2))):
            have, given_ = part(cache, place), part(prompt, place)[0, 0]
            assert torch.equal(have[pages[0], 0], given_[:2])
            assert torch.equal(have[pages[1], 0], torch.stack([given_[2], torch.zeros(3)]))
            assert not have[[p for p in range(4) if p not in pages]].any()


def test_skipped_users_and_missing_pages_write_nothing() -> None:
    with mesh_of((1, 2)) as mesh:
        table = everywhere(mesh, torch.tensor([[0], [-1], [2]]), ttnn.int32)
        cache = everywhere(mesh, torch.full((3, 1, 2, 4), 7.0))
        tokens = random_tensor(mesh, (1, 3, 1, 4), [True, False])
        ttnn.experimental.paged_update_cache(cache, tokens, update_idxs=[0, 1, -1], page_table=table)
        for place in places((1, 2)):
            have = part(cache, place)
            assert torch.equal(have[0, 0, 0], part(tokens, place)[0, 0, 0])
            assert (have.flatten()[4:] == 7).all()
        none = everywhere(mesh, torch.tensor([-1, -1, -1]), ttnn.int32)
        before = cache.block.clone()
        ttnn.experimental.paged_update_cache(cache, tokens, update_idxs_tensor=none, page_table=table)
        assert torch.equal(cache.block, before)


@pytest.mark.parametrize("positions", [(5, 5), (5, 2), (-1, -1), (-1, 3)], ids=str)
@pytest.mark.parametrize("cut", [False, True], ids=["one for all", "cut"])
def test_users_at_one_position_and_at_their_own_write_the_same_rows(positions: tuple[int, int], cut: bool) -> None:
    with mesh_of((1, 2)) as mesh:
        cache = random_tensor(mesh, (4, 3, 6, 8), [True, not cut])
        before = {place: part(cache, place).clone() for place in places((1, 2))}
        tokens = random_tensor(mesh, (1, 2, 3, 8), [True, False])  # devices differ: a cache for all of them grows
        at = everywhere(mesh, torch.tensor(positions), ttnn.int32)
        ttnn.experimental.paged_update_cache(cache, tokens, update_idxs_tensor=at, batch_offset=1)
        for place, expected in before.items():
            for user, position in enumerate(positions):
                if position >= 0:
                    expected[1 + user, :, position] = part(tokens, place)[0, user]
            assert torch.equal(part(cache, place), expected)


def test_only_devices_that_are_named_write() -> None:
    with mesh_of((2, 2)) as mesh:
        cache = everywhere(mesh, torch.zeros(1, 1, 2, 4))
        token = everywhere(mesh, torch.ones(1, 1, 1, 4))
        ttnn.experimental.paged_update_cache(
            cache, token, update_idxs=[1], mesh_coords={ttnn.MeshCoordinate(0, 1), ttnn.MeshCoordinate(1, 0)}
        )
        written = {place: bool(part(cache, place).any()) for place in places((2, 2))}
        assert written == {(0, 0): False, (0, 1): True, (1, 0): True, (1, 1): False}
        assert cache.tensor_topology().placements() == [UNKNOWN, UNKNOWN]


def test_positions_and_pages_outside_of_the_cache_are_refused() -> None:
    with mesh_of((1, 2)) as mesh:
        cache, token = everywhere(mesh, torch.zeros(2, 1, 4, 3)), everywhere(mesh, torch.ones(1, 2, 1, 3))
        update = ttnn.experimental.paged_update_cache
        with pytest.raises(OperandError, match="position 4 is out of range, there are 4"):
            update(cache, token, update_idxs=[0, 4])
        table = everywhere(mesh, torch.tensor([[0], [5]]), ttnn.int32)
        with pytest.raises(OperandError, match="page 5 is out of range, there are 2"):
            update(cache, token, update_idxs=[0, 1], page_table=table)
        with pytest.raises(OperandError, match="positions 3 to 5 of a cache of 4"):
            ttnn.fill_cache(cache, everywhere(mesh, torch.ones(1, 1, 3, 3)), 0, update_idx=3)
        with pytest.raises(OperandError, match="user 2 of 2"):
            ttnn.fill_cache(cache, everywhere(mesh, torch.ones(1, 1, 3, 3)), 2)
        assert not cache.block.any()


def test_a_round_cache_holds_the_newest_positions() -> None:
    """A cache of 4 positions, written round and round, decodes as a sliding window of 4 over a long one."""
    with mesh_of((1, 2)) as mesh:
        table = everywhere(mesh, torch.tensor([[1, 0]]), ttnn.int32)
        ring = [everywhere(mesh, torch.zeros(2, 1, 2, 3)) for _ in range(2)]
        dense = [everywhere(mesh, torch.zeros(1, 1, 12, 3)) for _ in range(2)]
        for at in range(10):
            for a, b in zip(ring, dense, strict=True):
                token = random_tensor(mesh, (1, 1, 1, 3), [True, False])
                ttnn.experimental.paged_update_cache(
                    a, token, update_idxs=[at], page_table=table, cache_position_modulo=4
                )
                ttnn.experimental.paged_update_cache(b, token, update_idxs=[at])
            q = random_tensor(mesh, (1, 1, 2, 3), [True, False])
            now = everywhere(mesh, torch.tensor([at]), ttnn.int32)
            for window in (None, 2):
                found = ttnn.transformer.paged_scaled_dot_product_attention_decode(
                    q, *ring, table, cur_pos_tensor=now, cache_position_modulo=4, sliding_window_size=window
                )
                expected = ttnn.transformer.scaled_dot_product_attention_decode(
                    q, *dense, cur_pos_tensor=now, sliding_window_size=window or 4
                )
                torch.testing.assert_close(found.block, expected.block)


# dense caches


@given(data=st.data())
@LIGHT
def test_fill_and_update_write_in_place(data: st.DataObject) -> None:
    grid, dtype = data.draw(planes), data.draw(st.sampled_from([ttnn.float32, ttnn.bfloat16]))
    with mesh_of(grid) as mesh:
        cache = everywhere(mesh, torch.zeros(3, 2, 8, 4), dtype)
        address = cache.buffer_address()
        prompt = random_tensor(mesh, (1, 2, 5, 4), data.draw(alike_for(grid)), dtype)
        tokens = random_tensor(mesh, (1, 2, 5, 4), data.draw(alike_for(grid)), dtype)
        assert ttnn.fill_cache(cache, prompt, 1, update_idx=2) is cache
        assert ttnn.update_cache(cache, tokens, 7, batch_offset=1) is cache
        assert cache.buffer_address() == address

        def one(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            made = torch.zeros(3, 2, 8, 4, dtype=p.dtype)
            made[1, :, 2:7] = p[0]
            made[:, :, 7] = t[0].transpose(0, 1)[1:4]
            return made

        check_each(cache, one, prompt, tokens)


def test_a_cache_is_labelled_as_what_is_written_into_it() -> None:
    with mesh_of((2, 2)) as mesh:
        cache = everywhere(mesh, torch.zeros(2, 1, 4, 3))
        prompt = of_block(mesh, torch.randn(1, 2, 1, 1, 2, 3), [R, S(1)])
        ttnn.fill_cache(cache, prompt, 0)
        assert cache.tensor_topology().placements() == [R, S(1)]
        tokens = of_block(mesh, torch.randn(2, 2, 1, 1, 2, 3), [S(2), S(1)])
        ttnn.update_cache(cache, tokens, 3)
        assert cache.tensor_topology().placements() == [S(0), S(1)]


def test_block_floats_are_rounded_when_written() -> None:
    with mesh_of((1, 2)) as mesh:
        cache = everywhere(mesh, torch.zeros(1, 1, 32, 32), ttnn.bfloat8_b)
        prompt = random_tensor(mesh, (1, 1, 32, 32), [True, False], ttnn.bfloat16, ttnn.TILE_LAYOUT)
        ttnn.fill_cache(cache, prompt, 0)
        assert torch.equal(cache.block, ttnn.typecast(prompt, ttnn.bfloat8_b).block)
        assert not torch.equal(cache.block, prompt.block)


def test_a_captured_decode_step_keeps_what_it_wrote() -> None:
    """Capture once, replay for every token: the cache grows, in memory that was stored once for all devices before."""
    users, heads, size = 2, 2, 4
    with mesh_of((1, 2)) as mesh:
        caches = [everywhere(mesh, torch.zeros(users, heads, 6, size)) for _ in range(2)]
        position = everywhere(mesh, torch.tensor([0, 2]), ttnn.int32)
        q, k, v = (random_tensor(mesh, (1, users, heads, size), [True, False]) for _ in range(3))
        trace = ttnn.begin_trace_capture(mesh, cq_id=0)
        for cache, token in zip(caches, (k, v), strict=True):
            ttnn.experimental.paged_update_cache(cache, token, update_idxs_tensor=position)
        found = ttnn.transformer.scaled_dot_product_attention_decode(q, *caches, cur_pos_tensor=position)
        ttnn.plus_one(position)
        ttnn.end_trace_capture(mesh, trace, cq_id=0)
        assert not any(cache.block.any() for cache in caches)
        plain = [torch.zeros(2, users, heads, 6, size) for _ in range(2)]
        for step in range(3):
            for tensor in (q, k, v):
                tensor.block.copy_(torch.randn(tensor.block.shape))
            ttnn.execute_trace(mesh, trace, cq_id=0, blocking=True)
            for own, token in enumerate((k, v)):
                for device in range(2):
                    for user, first in enumerate((0, 2)):
                        plain[own][device, user, :, first + step] = token.block[0, device, 0, user]
                assert torch.equal(caches[own].block[0], plain[own])
            for device in range(2):
                for user, first in enumerate((0, 2)):
                    own_k, own_v = (each[device, user, :, : first + step + 1] for each in plain)
                    expected = attention(q.block[0, device, 0, user][:, None], own_k, own_v)[:, 0]
                    torch.testing.assert_close(found.block[0, device, 0, user], expected)
        assert position.block[0, 0].tolist() == [3, 5]
        ttnn.release_trace(mesh, trace)


# tokens


def test_sampling_of_one_choice_takes_the_best() -> None:
    with mesh_of((1, 2)) as mesh:
        logits = random_tensor(mesh, (1, 1, 4, 8), [True, False])
        index = random_tensor(mesh, (1, 1, 4, 8), [True, False], ttnn.int32, high=1000)
        k, p, heat = (everywhere(mesh, torch.full((4,), x), d) for x, d in ((1, ttnn.uint32), (0.5, None), (1.0, None)))
        k = of_block(mesh, k.block.expand(1, 2, 4).clone(), [R, UNKNOWN], ttnn.uint32)
        found = ttnn.sampling(logits, index, k, p, heat, seed=3)
        assert (found.shape, found.dtype, found.layout) == ([1, 1, 1, 4], ttnn.uint32, ttnn.ROW_MAJOR_LAYOUT)
        check_each(found, lambda a, i: i.gather(-1, a.argmax(-1, keepdim=True)).reshape(1, 1, 1, 4), logits, index)


def test_devices_with_other_limits_draw_from_other_choices() -> None:
    with mesh_of((1, 2)) as mesh:
        logits = everywhere(mesh, torch.tensor([0.0, 5.0, 5.0]).expand(1, 1, 64, 3).clone())
        index = everywhere(mesh, torch.arange(3).expand(1, 1, 64, 3).clone(), ttnn.int32)
        limits = of_block(
            mesh, torch.tensor([1, 2]).reshape(1, 2, 1).expand(1, 2, 64).clone(), [R, UNKNOWN], ttnn.uint32
        )
        one = everywhere(mesh, torch.ones(64))
        found = ttnn.sampling(logits, index, limits, one, one, seed=5)
        assert set(found.block[0, 0].flatten().tolist()) == {1}
        assert set(found.block[0, 1].flatten().tolist()) == {1, 2}
        assert found.tensor_topology().placements() == [R, UNKNOWN]


def test_sampling_draws_by_probability_and_never_outside_of_k_and_p() -> None:
    users = 4000
    with mesh_of((1, 2)) as mesh:
        chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
        logits = everywhere(mesh, chances.log().expand(1, 1, users, 4).clone())
        index = everywhere(mesh, torch.arange(4).expand(1, 1, users, 4).clone(), ttnn.int32)

        def drawn(k: int, p: float) -> torch.Tensor:
            numbers = (
                everywhere(mesh, torch.full((users,), k), ttnn.uint32),
                everywhere(mesh, torch.full((users,), p)),
            )
            made = ttnn.sampling(logits, index, *numbers, everywhere(mesh, torch.ones(users)), seed=1)
            return torch.bincount(made.block.flatten(), minlength=4) / users

        assert torch.allclose(drawn(4, 1.0), chances, atol=0.04)
        assert torch.allclose(drawn(2, 1.0), torch.tensor([5 / 8, 3 / 8, 0, 0]), atol=0.04)
        assert torch.allclose(drawn(4, 0.6), torch.tensor([5 / 8, 3 / 8, 0, 0]), atol=0.04)
        assert drawn(4, 0.5).tolist() == [1, 0, 0, 0]
        assert torch.equal(drawn(4, 1.0), drawn(4, 1.0))


# the rest


@given(data=st.data())
@LIGHT
def test_products_shaped_for_decoding_are_products(data: st.DataObject) -> None:
    with mesh_of(grid := data.draw(planes)) as mesh:
        a = random_tensor(mesh, (1, 4, 3, 5), data.draw(alike_for(grid)))
        b = random_tensor(mesh, (3, 1, 5, 6), data.draw(alike_for(grid)))
        one = ttnn.experimental.attn_matmul(a, b, compute_with_storage_grid_size=ttnn.CoreCoord(8, 8))
        check_each(one, lambda x, y: (x.transpose(0, 2) @ y).transpose(0, 2), a, b, close=1e-5)
        c = random_tensor(mesh, (3, 2, 5, 6), data.draw(alike_for(grid)))
        groups = ttnn.experimental.group_attn_matmul(a, c, compute_with_storage_grid_size=ttnn.CoreCoord(8, 8))
        check_each(
            groups, lambda x, y: (x.transpose(0, 2) @ y.repeat_interleave(2, 1)).transpose(0, 2), *(a, c), close=1e-5
        )


def test_softmax_of_scores_is_done_in_place() -> None:
    with mesh_of((1, 2)) as mesh:
        x, mask = random_tensor(mesh, (1, 2, 4, 4), [True, False]), random_tensor(mesh, (1, 1, 1, 4), [True, True])
        before = of_block(mesh, x.block.clone(), x.tensor_topology().placements())
        found = ttnn.transformer.attention_softmax_(x, head_size=16, attention_mask=mask)
        assert found is x
        check_each(x, lambda p, m: (p / 4 + m).softmax(-1), before, mask, close=1e-6)


def test_sums_over_experts_and_fused_products() -> None:
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (3, 2, 4, 6), [True, False], layout=ttnn.TILE_LAYOUT)
        check_each(ttnn.experimental.fast_reduce_nc(x, dims=[0]), lambda p: p.sum(0, keepdim=True), x, close=1e-5)
        cut = distributed(mesh, torch.randn(4, 2, 3, 3), [R, S(0)])
        summed = ttnn.experimental.fast_reduce_nc(cut, dims=[0])
        assert summed.tensor_topology().placements() == [R, P("sum")]
        w = random_tensor(mesh, (6, 8), [True, False], layout=ttnn.TILE_LAYOUT)
        plain = ttnn.experimental.minimal_matmul(x, w)
        check_each(plain, lambda a, b: a @ b, x, w, close=1e-5)
        glu = ttnn.experimental.minimal_matmul(x, w, fuse_swiglu=True)
        check_each(glu, lambda a, b: F.silu((a @ b)[..., :4]) * (a @ b)[..., 4:], x, w, close=1e-5)
        pieces = ttnn.experimental.minimal_matmul_split(x, w, chunks=2)
        check_each(pieces[1], lambda a, b: (a @ b)[..., 4:], x, w, close=1e-5)


# traces


def _block_of_a_model(mesh: Any, given: dict[str, Any]) -> list[Any]:
    """Embedding, heads, rotation, attention, a convolution and a pool, moved about on the way."""
    rows = ttnn.to_layout(ttnn.embedding(given["tokens"], given["table"]), ttnn.TILE_LAYOUT)
    wide = ttnn.reshape(rows, (1, 1, 4, 24))
    q, k, v = ttnn.experimental.nlp_create_qkv_heads(wide, num_heads=2, transpose_k_heads=False)
    q, k = (ttnn.experimental.rotary_embedding(x, given["cos"], given["sin"])[:, :, :4] for x in (q, k))
    seen = ttnn.transformer.scaled_dot_product_attention(q, k, v, attention_sink=given["sink"])
    flat = ttnn.experimental.nlp_concat_heads(seen)
    pictures = ttnn.permute(ttnn.concat([flat, ttnn.roll(flat, 1, 2)], 1), (0, 2, 3, 1))
    sizes = {"batch_size": 1, "input_height": 4, "input_width": 8, "kernel_size": (3, 3), "padding": (1, 1)}
    convolved = convolve(ttnn.conv2d, mesh, pictures, given["kernels"], (2, 3), **sizes)
    pooled = ttnn.max_pool2d(convolved, 1, 4, 8, 3, [2, 2], [2, 2], [0, 0], [1, 1], dtype=ttnn.float32)
    return [flat, pooled, *ttnn.split(pooled, 1, dim=3)]


def test_a_captured_model_replays_with_other_inputs() -> None:
    with mesh_of((1, 2)) as mesh:
        angles = angles_of(4, 4)
        given_ = {
            "tokens": random_tensor(mesh, (1, 4), [True, False], ttnn.uint32, high=9),
            "table": random_tensor(mesh, (9, 24), [True, True]),
            "cos": everywhere(mesh, angles.cos().repeat(1, 2)[None, None]),
            "sin": everywhere(mesh, angles.sin().repeat(1, 2)[None, None]),
            "sink": random_tensor(mesh, (1, 2, 1, 1), [True, True]),
            "kernels": random_tensor(mesh, (3, 2, 3, 3), [True, False]),
        }
        trace = ttnn.begin_trace_capture(mesh, cq_id=0)
        captured = _block_of_a_model(mesh, given_)
        ttnn.end_trace_capture(mesh, trace, cq_id=0)
        for _ in range(2):
            given_["tokens"].block.copy_(torch.randint(0, 9, given_["tokens"].block.shape))
            given_["kernels"].block.copy_(torch.randn(given_["kernels"].block.shape))
            ttnn.execute_trace(mesh, trace, cq_id=0, blocking=True)
            for have, expected in zip(captured, _block_of_a_model(mesh, given_), strict=True):
                torch.testing.assert_close(have.block, expected.block)
                assert have.tensor_topology() == expected.tensor_topology()
        ttnn.release_trace(mesh, trace)


def test_latent_attention_takes_tensors_of_rank_four() -> None:
    with mesh_of((2, 2)) as device:
        x = of_block(device, torch.randn(2, 2, 4, 8), [P("unknown"), P("unknown")])
        with pytest.raises(OperandError, match="rank 4"):
            ttnn.transformer.flash_mla_prefill(x, x)


@pytest.mark.parametrize("window", [None, 4])
def test_queries_that_are_counted_from_the_start_make_no_whole_if_their_sequence_is_cut(window: int | None) -> None:
    q, k = torch.randn(2, 4, 12, 8), torch.randn(2, 4, 12, 8)
    keys = [R, R]
    with mesh_of((2, 2)) as device:
        near = ttnn.transformer.scaled_dot_product_attention(
            distributed(device, q, [S(2), S(0)]),
            distributed(device, k, [R, S(0)]),
            distributed(device, k, [R, S(0)]),
            is_causal=False,
            sliding_window_size=window,
        )
        assert near.tensor_topology().placements() == [S(2) if window is None else P("unknown"), S(0)]
        latent = distributed(device, q, [S(2), R]), distributed(device, k[:, :1], keys)
        causal = ttnn.transformer.flash_mla_prefill(*latent, 8, is_causal=True)
        assert causal.tensor_topology().placements() == [P("unknown"), R]
        check_whole(
            ttnn.transformer.flash_mla_prefill(*latent, 8, is_causal=False),
            F.scaled_dot_product_attention(q, k[:, :1], k[:, :1], enable_gqa=True),
            close=1e-5,
        )


@pytest.mark.parametrize("name", ["rotary_embedding", "rotary_embedding_hf"])
def test_angles_by_position_are_cut_with_the_sequence(name: str) -> None:
    x, cos, sin = torch.randn(1, 2, 8, 4), torch.randn(1, 1, 8, 4), torch.randn(1, 1, 8, 4)
    turn = getattr(ttnn.experimental, name)
    with mesh_of((2, 2)) as device:
        cut = distributed(device, x, [S(2), R])
        same = turn(cut, distributed(device, cos[:, :, :4], [R, R]), distributed(device, sin[:, :, :4], [R, R]))
        assert same.tensor_topology().placements() == [P("unknown"), R]
        found = turn(cut, distributed(device, cos, [S(2), R]), distributed(device, sin, [S(2), R]))
        turned = torch.cat([-x[..., 2:], x[..., :2]], -1)
        check_whole(found, x * cos + turned * sin, close=1e-5)
        with pytest.raises(OperandError, match="another rank"):
            turn(cut, *[of_block(device, torch.randn(2, 2, 4, 4), [P("unknown")] * 2)] * 2)
