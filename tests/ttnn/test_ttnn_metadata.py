"""Shape, padded shape, dtype, layout and memory of results, as they were measured on the original.

`tests/data/ttnn_op_metadata.txt` has one line for every call: `name => (shape, padded shape, dtype, layout, memory)`, a
list of such for several results, or `name !! error`. The calls are below, by name.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshloom import ttnn
from ttnn_cases import mesh

LINES = (Path(__file__).parents[1] / "data" / "ttnn_op_metadata.txt").read_text(encoding="utf-8").splitlines()
TILE, ROWS = ttnn.TILE_LAYOUT, ttnn.ROW_MAJOR_LAYOUT
BF16, F32, BF8, INT, UINT = ttnn.bfloat16, ttnn.float32, ttnn.bfloat8_b, ttnn.int32, ttnn.uint32


def made(*shape: int, dtype: Any = BF16, layout: Any = TILE) -> Any:
    """Small positive values on every device."""
    generator = torch.Generator().manual_seed(sum(shape))
    values = (
        torch.rand(shape, generator=generator) if dtype.is_float else torch.randint(0, 8, shape, generator=generator)
    )
    return ttnn.from_torch(values, dtype=dtype, layout=layout, device=mesh((1, 2)))


def a(**kinds: Any) -> Any:
    return made(1, 1, 32, 64, **kinds)


def b(**kinds: Any) -> Any:
    return made(1, 1, 64, 96, **kinds)


def device() -> Any:
    return mesh((1, 2))


def sharded() -> Any:
    config = ttnn.create_sharded_memory_config((1, 1, 32, 64), ttnn.CoreGrid(x=2, y=1), ttnn.ShardStrategy.WIDTH)
    return ttnn.to_memory_config(a(), config)


def heads() -> tuple[Any, Any, Any]:
    return made(1, 8, 64, 64), made(1, 8, 64, 64), made(1, 8, 64, 64)


def index() -> Any:
    return made(1, 1, 32, 64, dtype=ttnn.uint16)


CALLS: dict[str, Callable[[], Any]] = {
    "add": lambda: ttnn.add(a(), a()),
    "add bf16+f32": lambda: ttnn.add(a(), a(dtype=F32)),
    "add f32+bf16": lambda: ttnn.add(a(dtype=F32), a()),
    "add bf16+bf8": lambda: ttnn.add(a(), a(dtype=BF8)),
    "add int": lambda: ttnn.add(a(dtype=INT), a(dtype=INT)),
    "add scalar": lambda: ttnn.add(a(), 2.0),
    "scalar add": lambda: 2.0 + a(),
    "rsub": lambda: 2.0 - a(),
    "rdiv": lambda: 2.0 / a(),
    "add RM": lambda: ttnn.add(a(layout=ROWS), a(layout=ROWS)),
    "add bcast": lambda: ttnn.add(a(), made(1, 1, 1, 64)),
    "add bcast bad": lambda: ttnn.add(a(), made(1, 1, 32, 32)),
    "add dtype": lambda: ttnn.add(a(), a(), dtype=BF8),
    "add L1": lambda: ttnn.add(a(), a(), memory_config=ttnn.L1_MEMORY_CONFIG),
    "add activations": lambda: ttnn.add(a(), a(), activations=[ttnn.UnaryWithParam(ttnn.UnaryOpType.RELU)]),
    "mul str act": lambda: ttnn.multiply(a(), a(), input_tensor_a_activations=[ttnn.UnaryOpType.SILU]),
    "eq": lambda: ttnn.eq(a(), a()),
    "a==b": lambda: a() == a(),
    "gt scalar": lambda: ttnn.gt(a(), 0.5),
    "logical_and": lambda: ttnn.logical_and(a(), a()),
    "matmul": lambda: ttnn.matmul(a(), b()),
    "@": lambda: a() @ b(),
    "matmul bf8": lambda: ttnn.matmul(a(dtype=BF8), b()),
    "matmul f32": lambda: ttnn.matmul(a(), b(), dtype=F32),
    "matmul RM": lambda: ttnn.matmul(a(layout=ROWS), b(layout=ROWS)),
    "matmul 3d": lambda: ttnn.matmul(made(4, 32, 64), made(4, 64, 96)),
    "matmul batch": lambda: ttnn.matmul(made(2, 4, 32, 64), made(2, 4, 64, 96)),
    "matmul batch mismatch": lambda: ttnn.matmul(made(2, 4, 32, 64), made(3, 4, 64, 96)),
    "matmul tb": lambda: ttnn.matmul(a(), made(1, 1, 96, 64), transpose_b=True),
    "linear": lambda: ttnn.linear(a(), b(), bias=made(1, 1, 1, 96)),
    "linear bias1d": lambda: ttnn.linear(a(), b(), bias=made(96)),
    "matmul unaligned": lambda: ttnn.matmul(made(1, 1, 5, 7), made(1, 1, 7, 9)),
    "softmax": lambda: ttnn.softmax(a(), dim=-1),
    "softmax dim1": lambda: ttnn.softmax(a(), dim=1),
    "gelu": lambda: ttnn.gelu(a()),
    "silu": lambda: ttnn.silu(a()),
    "relu RM": lambda: ttnn.relu(a(layout=ROWS)),
    "rms_norm": lambda: ttnn.rms_norm(a(), weight=made(1, 1, 2, 32, layout=ROWS)),
    "layer_norm": lambda: ttnn.layer_norm(a(), weight=made(64), bias=made(64)),
    "rms_pre": lambda: ttnn.rms_norm_pre_all_gather(a()),
    "ln_pre": lambda: ttnn.layer_norm_pre_all_gather(a()),
    "sum": lambda: ttnn.sum(a()),
    "sum dim": lambda: ttnn.sum(a(), dim=-1),
    "sum keep": lambda: ttnn.sum(a(), dim=-1, keepdim=True),
    "mean": lambda: ttnn.mean(a(), dim=(2, 3)),
    "max dim": lambda: ttnn.max(a(), dim=3),
    "max": lambda: ttnn.max(a()),
    "argmax": lambda: ttnn.argmax(a(layout=ROWS), dim=-1),
    "argmax keep": lambda: ttnn.argmax(a(layout=ROWS), dim=-1, keepdim=True),
    "argmax none": lambda: ttnn.argmax(a(layout=ROWS)),
    "topk": lambda: ttnn.topk(a(), k=32),
    "cumsum": lambda: ttnn.cumsum(a(), dim=-1),
    "reshape": lambda: ttnn.reshape(a(), (1, 32, 1, 64)),
    "reshape -1": lambda: ttnn.reshape(a(), (1, 2, -1, 32)),
    "reshape bad": lambda: ttnn.reshape(a(), (1, 1, 32, 65)),
    "permute": lambda: ttnn.permute(a(), (0, 1, 3, 2)),
    "transpose": lambda: ttnn.transpose(a(), -2, -1),
    "concat": lambda: ttnn.concat([a(), a()], dim=3),
    "concat unaligned": lambda: ttnn.concat([a(), made(1, 1, 32, 16)], dim=3),
    "concat bad": lambda: ttnn.concat([a(), made(1, 1, 64, 64)], dim=3),
    "split": lambda: ttnn.split(a(), 32, dim=3),
    "split list": lambda: ttnn.split(a(), [32, 32], dim=3),
    "chunk": lambda: ttnn.chunk(a(), 2, 3),
    "slice": lambda: ttnn.slice(a(), [0, 0, 0, 0], [1, 1, 32, 32]),
    "getitem": lambda: a()[:, :, :16, :32],
    "getitem int": lambda: a()[0],
    "pad": lambda: ttnn.pad(a(), [(0, 0), (0, 0), (0, 32), (0, 0)], 0.0),
    "repeat": lambda: ttnn.repeat(a(), (1, 2, 1, 1)),
    "repeat_interleave": lambda: ttnn.repeat_interleave(a(), 2, dim=1),
    "expand": lambda: ttnn.expand(made(1, 1, 1, 64), (1, 1, 32, 64)),
    "squeeze": lambda: ttnn.squeeze(a(), 0),
    "unsqueeze": lambda: ttnn.unsqueeze(a(), 0),
    "unsqueeze_to_4D": lambda: ttnn.unsqueeze_to_4D(made(32, 64)),
    "stack": lambda: ttnn.stack([a(), a()], 0),
    "embedding": lambda: ttnn.embedding(made(1, 32, dtype=UINT, layout=ROWS), made(128, 64, layout=ROWS)),
    "embedding tile": lambda: ttnn.embedding(
        made(1, 32, dtype=UINT, layout=ROWS), made(128, 64, layout=ROWS), layout=TILE
    ),
    "typecast": lambda: ttnn.typecast(a(), BF8),
    "typecast RM": lambda: ttnn.typecast(a(layout=ROWS), F32),
    "clone": lambda: ttnn.clone(a()),
    "to_layout": lambda: ttnn.to_layout(made(1, 1, 5, 7), ROWS),
    "tilize": lambda: ttnn.tilize(a(layout=ROWS)),
    "tilize unaligned": lambda: ttnn.tilize(made(1, 1, 5, 7, layout=ROWS)),
    "tilize_zp": lambda: ttnn.tilize_with_zero_padding(made(1, 1, 5, 7, layout=ROWS)),
    "untilize": lambda: ttnn.untilize(a()),
    "where": lambda: ttnn.where(a(), a(), 0.0),
    "clamp": lambda: ttnn.clamp(a(), 0.1, 0.5),
    "zeros": lambda: ttnn.zeros([2, 3], device=device()),
    "ones tile": lambda: ttnn.ones([2, 3], layout=TILE, device=device()),
    "full": lambda: ttnn.full([2, 3], 1.5, device=device()),
    "arange": lambda: ttnn.arange(10, device=device()),
    "zeros_like": lambda: ttnn.zeros_like(a()),
    "full_like": lambda: ttnn.full_like(a(), 2.0),
    "sdpa": lambda: ttnn.transformer.scaled_dot_product_attention(*heads(), is_causal=True),
    "qkv": lambda: ttnn.experimental.nlp_create_qkv_heads(
        made(1, 1, 64, 768), num_heads=8, num_kv_heads=2, transpose_k_heads=False
    ),
    "concat heads": lambda: ttnn.experimental.nlp_concat_heads(made(1, 8, 64, 64)),
    "split qkv": lambda: ttnn.transformer.split_query_key_value_and_split_heads(made(1, 64, 768), num_heads=4),
    "concatenate_heads": lambda: ttnn.transformer.concatenate_heads(made(1, 4, 64, 64)),
    "plus_one": lambda: ttnn.plus_one(made(32, dtype=INT, layout=ROWS)),
    "to L1": lambda: ttnn.to_memory_config(a(), ttnn.L1_MEMORY_CONFIG),
    "shard": sharded,
    "scatter": lambda: ttnn.scatter(a(layout=ROWS), 3, made(1, 1, 32, 64, dtype=INT, layout=ROWS), a(layout=ROWS)),
    "gather": lambda: ttnn.gather(a(), 3, index()),
    "sort": lambda: ttnn.sort(a()),
    "prod": lambda: ttnn.prod(a()),
    "std": lambda: ttnn.std(a(), dim=-1),
    "identity": lambda: ttnn.identity(a(layout=ROWS)),
}


def described(found: Any) -> Any:
    """What a line of the data says of a result."""
    if isinstance(found, (list, tuple)):
        return [described(each) for each in found]
    return (
        list(found.shape),
        list(found.padded_shape),
        found.dtype.name,
        found.layout.name,
        found.memory_config().buffer_type.name,
    )


def check_line(line: str, call: Callable[[], Any]) -> None:
    """Raise unless a call gives what its line says."""
    if " !! " in line:
        kind, _, text = line.partition(" !! ")[2].partition(": ")
        with pytest.raises(getattr(__import__("builtins"), kind)) as caught:
            call()
        assert ast.literal_eval(text) in str(caught.value)
    else:
        assert described(call()) == ast.literal_eval(line.partition(" => ")[2])


def name_of(line: str) -> str:
    return line.partition(" !! ")[0].partition(" => ")[0]


@pytest.mark.parametrize("line", LINES, ids=name_of)
def test_a_result_has_the_metadata_that_was_measured(line: str) -> None:
    check_line(line, CALLS[name_of(line)])


def test_every_line_has_a_call_and_every_call_a_line() -> None:
    assert sorted(map(name_of, LINES)) == sorted(CALLS)


def test_other_metadata_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check_line("sum dim => ([1, 1, 32, 1], [1, 1, 32, 32], 'BFLOAT16', 'TILE', 'DRAM')", CALLS["sum dim"])
    with pytest.raises(AssertionError):
        check_line("matmul RM !! RuntimeError: 'Inputs must be square'", CALLS["matmul RM"])
