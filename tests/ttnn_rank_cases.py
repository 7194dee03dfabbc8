"""What ranks run in `test_ttnn_processes.py`: programs of the per-device view, each a function of a mesh.

`run(names, shape)` opens a mesh and gives what every program returns. In one process the mesh is whole; several split
it, and must give the same: values to the bit where nothing is summed between processes, labels as text.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import meshloom as loom
from meshloom import ttnn
from meshloom.comms.modes import HostTrafficWarning
from meshloom.errors import OperandError

Program = Callable[[Any], Any]
PROGRAMS: dict[str, Program] = {}
S, R = ttnn.PlacementShard, ttnn.PlacementReplicate()
TILE, ROWS = ttnn.TILE_LAYOUT, ttnn.ROW_MAJOR_LAYOUT
MODES = ("direct", "host", "fabric")


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def run(names: Sequence[str], shape: tuple[int, ...] = (2, 4)) -> dict[str, Any]:
    """What each of these programs returns on a mesh of that shape."""
    warnings.simplefilter("ignore", HostTrafficWarning)
    with ttnn.create_mesh_device(ttnn.MeshShape(*shape)) as mesh, ttnn.strictness("lenient"):  # groups of one too
        return {name: PROGRAMS[name](mesh) for name in names}


def told(x: Any) -> dict[str, Any]:
    """All that a program can see of a tensor: every part, the label, and what is read without a composer."""
    parts = ttnn.to_torch(x, mesh_composer=ttnn.ListMeshToTensor())
    try:
        whole: Any = ttnn.to_torch(x)
    except OperandError as error:
        whole = error.headline
    shown = [signed(each) for each in parts], signed(whole)
    return {"parts": shown[0], "label": str(x.tensor_topology()), "whole": shown[1], "shape": list(x.shape)}


def signed(x: Any) -> Any:
    """A tensor in a dtype that can be pickled, if it is one."""
    return x.to(torch.int64) if isinstance(x, torch.Tensor) and x.dtype in (torch.uint16, torch.uint32) else x


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def put(x: torch.Tensor, mesh: Any, *dims: int | None, **options: Any) -> Any:
    """On a mesh, each axis cutting a dim or none."""
    placements = [R if dim is None else S(dim) for dim in dims]
    mapper = ttnn.create_mesh_mapper(mesh, ttnn.MeshMapperConfig(placements), uneven=options.pop("uneven", False))
    return ttnn.from_torch(x, device=mesh, mesh_mapper=mapper, **{"layout": TILE, **options})


# mappers, composers, parts


@program
def mappers(mesh: Any) -> list[Any]:
    x, made = numbers(16, 24), []
    count = mesh.get_num_devices()
    for dim in (0, 1):
        made.append(ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=dim)))
    for dims in itertools.product((None, 0, 1), repeat=len(mesh.shape)):
        if len({dim for dim in dims if dim is not None}) == sum(dim is not None for dim in dims):
            made.append(put(x, mesh, *dims))
    made.append(ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ReplicateTensorToMesh(mesh)))
    made.append(ttnn.from_torch(x, device=mesh, dtype=ttnn.bfloat8_b, layout=TILE))
    uneven = ttnn.ShardTensorToMesh(mesh, dim=0, uneven=True)
    made.append(ttnn.from_torch(numbers(count + 1, 3), device=mesh, mesh_mapper=uneven))
    fewer = ttnn.MeshMapperConfig([S(0)], ttnn.MeshShape([count - 1]))
    made.append(ttnn.from_torch(numbers(count - 1, 3), device=mesh, mesh_mapper=ttnn.create_mesh_mapper(mesh, fewer)))
    made.append(ttnn.from_torch(numbers(2, 3), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0)))
    return [told(each) for each in made]


@program
def composers(mesh: Any) -> list[torch.Tensor]:
    x = put(numbers(16, 24), mesh, *(None,) * (len(mesh.shape) - 1), 1)
    every = ttnn.MeshComposerConfig([1], ttnn.MeshShape([mesh.get_num_devices()]))
    found = [
        ttnn.to_torch(x),
        ttnn.to_torch(x, mesh_composer=ttnn.ConcatMeshToTensor(mesh, dim=0)),
        ttnn.to_torch(x, mesh_composer=ttnn.create_mesh_composer(mesh, every)),
        ttnn.to_torch(x, mesh_composer=ttnn.create_mesh_composer(mesh, ttnn.MeshComposerConfig([0], [1]))),
        x.cpu().to_torch(),
        ttnn.to_torch(x.cpu(), mesh_composer=ttnn.ConcatMeshToTensor(mesh, dim=1)),
        ttnn.to_torch(ttnn.aggregate_tensor(x.cpu(), ttnn.ConcatMeshToTensor(mesh, dim=0))),
    ]
    if len(mesh.shape) == 2:
        both = ttnn.ConcatMesh2dToTensor(mesh, tuple(mesh.shape), dims=(0, 1))
        found.append(ttnn.to_torch(x, mesh_composer=both))
    return found


@program
def parts_one_by_one(mesh: Any) -> list[torch.Tensor]:
    x = put(numbers(16, 24), mesh, *(None,) * (len(mesh.shape) - 1), 1)
    each = ttnn.get_device_tensors(x)
    found = [ttnn.to_torch(one) for one in each] + [ttnn.to_torch(one) for one in ttnn.get_device_tensors(x.cpu())]
    found += [ttnn.to_torch(ttnn.add(one, 1.0)) for one in each[:2]]
    joined = ttnn.combine_device_tensors(tensors=[ttnn.multiply(one, 2.0) for one in each])
    again = ttnn.from_host_shards(ttnn.get_device_tensors(x.cpu()), mesh.shape)
    moved = ttnn.to_device(again, mesh)
    composer = ttnn.ConcatMeshToTensor(mesh, dim=0)
    return [*found, *(ttnn.to_torch(one, mesh_composer=composer) for one in (joined, again, moved))]


@program
def text_and_numbers(mesh: Any) -> list[Any]:
    x = put(numbers(8, 8), mesh, *(None,) * (len(mesh.shape) - 1), 1)
    one = ttnn.from_torch(torch.tensor([[3.5]]), device=mesh)
    return [str(x), one.item(), one.to_list(), x.to_numpy().sum().item(), str(ttnn.add(one, 1.0))]


@program
def written_in_place(mesh: Any) -> list[Any]:
    last = len(mesh.shape) - 1
    x, other = numbers(16, 24), numbers(16, 24, seed=1)
    room = ttnn.allocate_tensor_on_device(ttnn.Shape([16, 24 // mesh.shape[-1]]), ttnn.float32, ROWS, mesh)
    host = ttnn.from_torch(x, mesh_mapper=ttnn.create_mesh_mapper(mesh, ttnn.MeshMapperConfig([R] * last + [S(1)])))
    ttnn.copy_host_to_device_tensor(host, room)
    back = ttnn.allocate_tensor_on_host(room.spec, mesh)
    ttnn.copy_device_to_host_tensor(room, back)
    output = put(other, mesh, *(None,) * last, 1, layout=ROWS)
    ttnn.add(room, 1.0, output_tensor=output)
    once = ttnn.from_torch(x[:, : 24 // mesh.shape[-1]], device=mesh)
    ttnn.add(room, once, output_tensor=once)  # what all held alike is different now
    return [told(each) for each in (room, back, output, once)]


@program
def views_that_follow(mesh: Any) -> list[Any]:
    """Views of what all held alike, after some devices, or all, got other values."""
    found = []
    for axis in range(len(mesh.shape)):
        dims = [0 if each == axis else None for each in range(len(mesh.shape))]
        x = ttnn.from_torch(numbers(2, 4), device=mesh, layout=ROWS)
        view = ttnn.reshape(x, [4, 2])
        ttnn.add(put(numbers(2 * mesh.shape[axis], 4, seed=1), mesh, *dims, layout=ROWS), x, output_tensor=x)
        same = ttnn.from_torch(numbers(2, 4), device=mesh, layout=ROWS)
        other = ttnn.reshape(same, [4, 2])
        ttnn.copy_host_to_device_tensor(ttnn.from_torch(numbers(2, 4, seed=2)), same)
        found += [x, view, same, other]
    return [told(each) for each in found]


@program
def random_numbers(mesh: Any) -> list[Any]:
    torch.manual_seed(3)
    x = ttnn.from_torch(torch.full((4, 6), 0.5), device=mesh)
    drawn = [ttnn.bernoulli(x), ttnn.bernoulli(x, seed=5), ttnn.uniform(x, 0, 1), ttnn.rand([4, 4], device=mesh)]
    return [ttnn.to_torch(each, mesh_composer=ttnn.ListMeshToTensor()) for each in drawn]


@program
def files(mesh: Any) -> list[Any]:
    import pickle
    import tempfile
    from pathlib import Path

    x = put(numbers(16, 24), mesh, *(None,) * (len(mesh.shape) - 1), 1)
    with tempfile.TemporaryDirectory() as folder:
        ttnn.dump_tensor(Path(folder) / "x.tensorbin", x)
        loaded = ttnn.load_tensor(Path(folder) / "x.tensorbin", device=mesh)
        mapper = ttnn.ShardTensorToMesh(mesh, dim=1)
        how: dict[str, Any] = {"layout": TILE, "device": mesh, "memory_config": ttnn.DRAM_MEMORY_CONFIG}
        cached = [
            ttnn.as_tensor(numbers(16, 24), ttnn.float32, **how, cache_file_name=Path(folder) / "w", mesh_mapper=mapper)
            for _ in range(2)
        ]
    pickled = ttnn.to_device(pickle.loads(pickle.dumps(x)), mesh)
    return [told(each) for each in (loaded, *cached, pickled)]


# collectives


def operands(mesh: Any, *shape: int) -> list[Any]:
    """Tensors that lie on a mesh in different ways."""
    axes = len(mesh.shape)
    x = numbers(*shape)
    return [
        ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0), layout=ROWS),
        put(x, mesh, *(None,) * (axes - 1), 1, layout=ROWS),
        put(x, mesh, 0, *(None,) * (axes - 1), layout=ROWS),
        ttnn.from_torch(x, device=mesh, layout=ROWS),
    ]


def every_way(mesh: Any, collective: Callable[..., Any], size: int = 24, modes: Sequence[str] = MODES) -> list[Any]:
    """A collective of every operand over every group, in every mode."""
    found = []
    for x in operands(mesh, size, size):
        for axis in (None, *range(len(mesh.shape))):
            for mode in modes:
                try:
                    made = collective(x, cluster_axis=axis, mode=mode)
                except OperandError as error:  # the same everywhere, too
                    found.append(error.headline)
                    continue
                found += [told(each) for each in (made if isinstance(made, list) else [made])]
    return found


@program
def all_gather(mesh: Any) -> list[Any]:
    return [every_way(mesh, lambda x, dim=dim, **over: ttnn.all_gather(x, dim=dim, **over)) for dim in (0, 1)]


@program
def all_reduce(mesh: Any) -> list[Any]:
    return every_way(mesh, ttnn.all_reduce)


@program
def reduce_scatter(mesh: Any) -> list[Any]:
    return every_way(mesh, lambda x, **over: ttnn.reduce_scatter(x, dim=1, **over), 64)


@program
def mesh_partition(mesh: Any) -> list[Any]:
    def partition(x: Any, dim: int, cluster_axis: int | None, mode: str) -> Any:
        return ttnn.mesh_partition(x, dim, cluster_axis=cluster_axis)

    return [every_way(mesh, partial(partition, dim=dim), 144, ["direct"]) for dim in (0, 1)]


@program
def broadcast(mesh: Any) -> list[Any]:
    corners = (ttnn.MeshCoordinate([0] * len(mesh.shape)), ttnn.MeshCoordinate([size - 1 for size in mesh.shape]))
    return [every_way(mesh, lambda x, corner=corner, **over: ttnn.broadcast(x, corner, **over)) for corner in corners]


@program
def all_broadcast(mesh: Any) -> list[Any]:
    return every_way(mesh, ttnn.all_broadcast)


@program
def point_to_point(mesh: Any) -> list[Any]:
    first, last = [0] * len(mesh.shape), [0] * (len(mesh.shape) - 1) + [mesh.shape[-1] - 1]
    ends = [(first, last), (last, first), ([size - 1 for size in mesh.shape[:-1]] + [0], first)]
    found = []
    for x in operands(mesh, 24, 24):
        for a, b in ends:
            found.append(ttnn.point_to_point(x, ttnn.MeshCoordinate(a), ttnn.MeshCoordinate(b)))
            room = ttnn.from_torch(torch.ones(*x.shape), device=mesh, layout=ROWS)
            found.append(ttnn.point_to_point(x, ttnn.MeshCoordinate(a), ttnn.MeshCoordinate(b), output_tensor=room))
    return [told(each) for each in found]


@program
def reduce_to_root(mesh: Any) -> list[Any]:
    place = ttnn.MeshCoordinate([size - 1 for size in mesh.shape])
    values, sums, tops = (
        ttnn.from_torch(each, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
        for each in (numbers(24, 8), numbers(24, 2, seed=1).exp(), numbers(24, 2, seed=2))
    )
    return [told(each) for each in ttnn.reduce_to_root(values, sums, tops, place, scale_fp32=0.5)]


@program
def asynchronous(mesh: Any) -> list[Any]:
    work = ttnn.experimental
    found: list[Any] = []
    for dims in ((0, 1), (1, 0), (1, 1)):
        found.append(every_way(mesh, lambda x, d=dims, **over: work.all_to_all_async_generic(x, *d, **over), 64))
    x = operands(mesh, 48, 48)
    found += [told(work.all_gather_async(each, 0)) for each in x]
    found += [told(work.all_gather_async_reversed(each, 0)) for each in x]
    found += [told(work.slice_reshard_async(x[0], 0, 4, 8, cluster_axis=len(mesh.shape) - 1))]
    found += [told(each) for each in work.reduce_scatter_minimal_async_create_intermediate_buffer(x[3], dim=1)]
    for mode in ("zeros", "replicate"):
        for axis in range(len(mesh.shape)):
            found += [told(work.neighbor_pad_async(each, 0, 1, 2, mode, axis)) for each in x]
    weight = ttnn.from_torch(numbers(64, 16), device=mesh, layout=TILE)
    tiles = put(numbers(64, 64), mesh, 0, *(None,) * (len(mesh.shape) - 1))
    found += [told(each) for each in work.all_gather_matmul_async(tiles, weight, dim=0)]
    return found


@program
def on_part_of_the_mesh(mesh: Any) -> list[Any]:
    count = mesh.get_num_devices()
    first = ttnn.create_mesh_mapper(mesh, ttnn.MeshMapperConfig([S(0)], ttnn.MeshShape([count // 2])))
    x = ttnn.from_torch(numbers(count * 2, 8), device=mesh, mesh_mapper=first)
    one = ttnn.get_device_tensors(x)[1]
    made = [
        ttnn.add(x, 1.0),
        ttnn.all_gather(x, dim=0),
        ttnn.all_reduce(x),
        ttnn.all_reduce(x, mode="fabric"),
        ttnn.reduce_scatter(x, dim=1) if 8 % (count // 2) == 0 else x,
        ttnn.broadcast(x, x.device_coords()[-1]),
        ttnn.multiply(one, 2.0),
    ]
    return [told(each) for each in made]


# experts


@program
def experts(mesh: Any) -> list[Any]:
    """A block of experts, two on every device: tokens go to the devices of those that they chose, and back."""
    count, batch, width = mesh.get_num_devices(), 2 * mesh.get_num_devices(), 32
    owner = torch.randperm(2 * count, generator=torch.Generator().manual_seed(5)) % count
    mapping = torch.nn.functional.one_hot(owner, count).reshape(1, 1, 2 * count, count)
    table = ttnn.from_torch(mapping.to(torch.int32), device=mesh, dtype=ttnn.uint16)
    tokens, scores = numbers(batch, 1, 1, width), numbers(batch, 1, 1, 2 * count, seed=2)
    chosen = scores.topk(2, -1)
    cut = ttnn.ShardTensorToMesh(mesh, dim=0)
    x = ttnn.from_torch(tokens, device=mesh, mesh_mapper=cut)
    picked = ttnn.from_torch(chosen.indices.int(), device=mesh, mesh_mapper=cut, dtype=ttnn.uint16)
    order = torch.argsort(owner, stable=True)  # a device's experts, by their numbers
    up = ttnn.from_torch(numbers(2 * count, width, 48, seed=3)[order], device=mesh, mesh_mapper=cut, layout=TILE)
    down = ttnn.from_torch(numbers(2 * count, 48, width, seed=4)[order], device=mesh, mesh_mapper=cut, layout=TILE)
    found: list[Any] = []
    for axis in (None, *range(len(mesh.shape))):
        sent, metadata = ttnn.all_to_all_dispatch(x, picked, table, cluster_axis=axis)
        rows = ttnn.to_layout(ttnn.reshape(sent, [1, sent.shape[1] * sent.shape[2], width]), TILE)
        made = ttnn.matmul(ttnn.silu(ttnn.matmul(ttnn.repeat(rows, [2, 1, 1]), up)), down)
        made = ttnn.to_layout(ttnn.reshape(made, [2, sent.shape[1], 1, width]), ROWS)
        back = ttnn.all_to_all_combine(made, metadata, table, cluster_axis=axis)
        summed = ttnn.all_to_all_combine(sent, metadata, table, cluster_axis=axis, local_reduce=True)
        found += [told(each) for each in (sent, metadata, back, summed)]
    weights = ttnn.from_torch(scores.softmax(-1).reshape(1, batch, 1, 2 * count), device=mesh)
    every = ttnn.from_torch(chosen.indices.int().reshape(1, batch, 1, 2), device=mesh, dtype=ttnn.uint16)
    found += [told(each) for each in ttnn.moe_expert_token_remap(weights, table, every)]
    last = len(mesh.shape) - 1
    shared = ttnn.moe_routing_remap(ttnn.from_torch(numbers(1, 8), device=mesh), 8, mesh.shape[-1], last)
    return [*found, told(shared)]


# ops with a global meaning


@program
def fused(mesh: Any) -> list[Any]:
    """Collectives that are one op with products, norms, heads or attention, and what draws for every device."""
    axis, made = len(mesh.shape) - 1, []
    over = [None] * axis
    x, w = put(numbers(1, 1, 8, 24), mesh, *over, 3), put(numbers(24, 24, seed=1), mesh, *over, None)
    rows = put(numbers(24, 24, seed=1), mesh, *over, 0)
    how = {"multi_device_global_semaphore": [], "cluster_axis": axis}
    made += ttnn.experimental.all_gather_minimal_matmul_async(x, w, chunks=2, **how)
    made += ttnn.experimental.minimal_matmul_strided_reduce_scatter_async(
        x, rows, 3, [], ttnn.CoreCoord(0, 6), cluster_axis=axis
    )
    made += ttnn.experimental.llama_rs_matmul(x, rows, None, 3, None, axis, mesh)
    made.append(ttnn.experimental.dit_fused_distributed_rmsnorm(x, axis, mesh, [], weight=None))
    made.append(ttnn.experimental.dit_fused_distributed_layernorm(x, axis, mesh, []))
    places = put(numbers(2, 1, 24, 6), mesh, *over, 2)
    made.append(
        ttnn.experimental.dit_fused_distributed_groupnorm(
            places, num_groups=3, cluster_axis=axis, mesh_device=mesh, multi_device_global_semaphore=[]
        )
    )
    keys = put(numbers(1, 2, 24, 4), mesh, *over, 2)
    ring = {"logical_n": 20, "cluster_axis": axis, "mesh_device": mesh, "multi_device_global_semaphore": []}
    for causal in (False, True):
        found = ttnn.transformer.ring_joint_scaled_dot_product_attention(
            keys, keys, keys, joint_strategy="rear", dim=2, num_links=1, is_causal=causal, **ring
        )
        made += [each for each in found if each is not None]
    size = mesh.shape[axis]
    heads = put(numbers(1, 2, 4 * size, 4, seed=2), mesh, *over, None)
    made.append(ttnn.transformer.ring_distributed_scaled_dot_product_attention(heads, heads, heads, size))
    made += [ttnn.experimental.dropout(each, 0.5, 2.0, 3) for each in (x, w)]
    made.append(ttnn.experimental.dropout(w, 0.5, 2.0, 3, use_per_device_seed=False))
    made += ttnn.experimental.fft(put(numbers(24, 5), mesh, *over, 0))
    made.append(ttnn.moreh_clip_grad_norm([x, w], 0.5))
    return [*map(told, made), told(x), told(w)]


@program
def distributed(mesh: Any) -> list[Any]:
    ops, axes = ttnn.distributed, len(mesh.shape)
    ways = [
        lambda x: ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0), layout=TILE),
        lambda x: ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=1), layout=TILE),
        lambda x: put(x, mesh, *(None,) * (axes - 1), 1),
        lambda x: ttnn.from_torch(x, device=mesh, layout=TILE),
    ]
    a, b = numbers(24, 24), numbers(24, 24, seed=1)
    found = []
    for left, right in itertools.product(ways, repeat=2):
        product = ops.matmul(left(a), right(b))
        found += [product, ops.add(left(a), right(b)), ops.matmul(left(a), right(b), output=S(0))]
    for way in ways:
        found += [ops.softmax(way(a), dim=-1), ops.sum(way(a), dim=0), ops.gelu(way(a)), ops.mean(way(a), dim=1)]
    uneven = ttnn.ShardTensorToMesh(mesh, dim=0, uneven=True)
    odd = ttnn.from_torch(numbers(mesh.get_num_devices() + 1, 4), device=mesh, mesh_mapper=uneven, layout=TILE)
    found += [ops.sum(odd, dim=0), ops.add(odd, odd), ops.softmax(odd, dim=0)]
    return [told(each) for each in found]


@program
def local_ops_on_padding(mesh: Any) -> list[Any]:
    uneven = ttnn.ShardTensorToMesh(mesh, dim=0, uneven=True)
    x = ttnn.from_torch(numbers(mesh.get_num_devices() + 1, 4), device=mesh, mesh_mapper=uneven, layout=TILE)
    found = [ttnn.softmax(x, dim=0), ttnn.sum(x, dim=0), ttnn.mean(x, dim=0), ttnn.max(x, dim=0), ttnn.argmax(x, dim=0)]
    return [told(each) for each in found]


# models


@program
def mlp(mesh: Any) -> list[torch.Tensor]:
    import ttnn_mlp as example

    weights = example.Weights.draw(32, 64, torch.float32)
    x = numbers(16, 32)
    ways = [example.data_parallel, example.tensor_parallel, example.unsaid]
    return [way(x, weights, mesh) for way in (*ways, *([example.hybrid] if len(mesh.shape) == 2 else []))]


@program
def decoder(mesh: Any) -> list[torch.Tensor]:
    import ttnn_decoder as example

    layer = example.Layer(example.Config(width=64, heads=8, kv_heads=4, head=16, hidden=96, longest=64))
    x = example.sequences(layer.config, 4, 10)
    model = example.Decoder(layer, mesh, 4)
    return [model.prefill(x[:, :8]), *(model.decode(x[:, at], at) for at in (8, 9))]


@program
def moe(mesh: Any) -> torch.Tensor:
    import ttnn_moe as example

    block = example.Block(example.Config(width=64, hidden=64, experts=16, chosen=2))
    found: torch.Tensor = example.Experts(block, mesh, 32)(block.draw_tokens(32 * mesh.shape[0]))
    return found


# what a process holds


@program
def bytes_held(mesh: Any) -> dict[str, int]:
    """The bytes that this process has for tensors, weights and results."""
    x, w = numbers(64, 64), numbers(64, 64, seed=1)
    cut = ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0), layout=TILE)
    weight = ttnn.from_torch(w, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=1), layout=TILE)
    made = {
        "mapped": cut,
        "weight": weight,
        "added": ttnn.add(cut, 1.0),
        "on the host": cut.cpu(),
        "summed": ttnn.multiply(ttnn.reduce_scatter(weight, dim=0), 2.0),
        "room": ttnn.allocate_tensor_on_device(ttnn.Shape([8, 8]), ttnn.float32, TILE, mesh),
    }
    return {name: each.block.untyped_storage().nbytes() for name, each in made.items()}


@program
def scopes(mesh: Any) -> dict[str, Any]:
    view = mesh.get_view()
    every = [ttnn.MeshCoordinate(place) for place in itertools.product(*map(range, mesh.shape))]
    return {
        "ids": mesh.get_device_ids(),
        "shape": tuple(mesh.shape),
        "here": [tuple(place) for place in every if view.is_local(place)],
        "recorded": _recorded(mesh),
    }


def _recorded(mesh: Any) -> list[str]:
    x = ttnn.from_torch(torch.ones(8, 8), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    with loom.record() as log:
        ttnn.all_gather(x, dim=0)
        ttnn.add(x, x)
    return sorted(log.kinds().elements())


def bound(bindings: Sequence[dict[str, str]], shape: tuple[int, ...] = (2, 4)) -> Any:
    """What a rank with these variables says of a mesh, or the first line of the error."""
    os.environ.update(bindings[int(os.environ["RANK"])])
    try:
        system = ttnn.SystemMeshDescriptor()
        mesh = ttnn.open_mesh_device(ttnn.MeshShape(*shape))
    except (RuntimeError, ValueError) as error:
        print(error)
        return str(error).splitlines()[0]
    view, every = mesh.get_view(), list(itertools.product(*map(range, shape)))
    x = ttnn.from_torch(numbers(24, 24), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    found = {
        "ids": (mesh.get_device_ids(), mesh.get_device_ids("local")),
        "shapes": (tuple(view.shape()), tuple(view.shape("local")), view.num_devices(), view.num_devices("local")),
        "offset": tuple(view.local_offset()),
        "range": [tuple(place) for place in view.coord_range("local")],
        "system": (tuple(system.shape()), tuple(system.local_shape()), system.all_local()),
        "here": [view.is_local(ttnn.MeshCoordinate(place)) for place in every],
        "in the buffer": [x.cpu().host_buffer().is_local(ttnn.MeshCoordinate(place)) for place in every],
        "held": [x.cpu().host_buffer().get_shard(ttnn.MeshCoordinate(place)) is not None for place in every],
        "sum": ttnn.to_torch(ttnn.all_reduce(x)).sum().item(),
    }
    ttnn.close_mesh_device(mesh)
    return found


def refusals() -> list[str]:
    """What a mesh over several processes refuses, in the first lines of the errors."""
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(2, 4))
    x = ttnn.from_torch(numbers(8, 8), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    core = ttnn.MeshCoreCoord(ttnn.MeshCoordinate(0, 0), ttnn.CoreCoord(0, 0))
    memory = ttnn.SocketMemoryConfig(ttnn.BufferType.L1, 4096)
    config = ttnn.SocketConfig([ttnn.SocketConnection(core, core)], memory)

    def capture() -> None:
        trace = ttnn.begin_trace_capture(mesh, cq_id=0)
        try:
            ttnn.all_gather(ttnn.add(x, 1.0), dim=0)
        finally:
            ttnn.end_trace_capture(mesh, trace, cq_id=0)

    remote = [place for place in x.device_coords() if not mesh.get_view().is_local(place)]
    told = []
    for act in (capture, lambda: ttnn.MeshSocket(mesh, config), lambda: x.part(remote[0])):
        try:
            act()
        except RuntimeError as error:
            told.append(str(error).splitlines()[0])
    ttnn.close_mesh_device(mesh)
    return told


def unsplit() -> tuple[list[str], list[Any], torch.Tensor]:
    """A mesh that three processes cannot split: the warnings, what is here, and a sum over all devices."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = ttnn.open_mesh_device(ttnn.MeshShape(2, 4))
    x = ttnn.from_torch(numbers(8, 8), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    total = ttnn.to_torch(ttnn.all_reduce(x))
    ttnn.close_mesh_device(mesh)
    return [str(each.message) for each in caught], list(x.block.shape), total
