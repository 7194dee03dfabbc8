"""Works of the per-device view: small calls of `ttnn`, literal collectives, block floats, a decoding Llama."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.goals import Goal
from benchmarks.works import Pair, Spec, WrongAnswer
from meshloom import ttnn

SIDE = 32  # of what one device holds
ADD = Goal("extra_us", 5.0, " us")
COLLECTIVE = Goal("ours_us", 60.0, " us at most")
BLOCK_FLOAT = Goal("ratio", 3.0)
DECODE = Goal("ratio", 2.5)
ELEMENTS = 8 << 20

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, LONGEST = 2, 1024, 16, 8, 64, 2048, 128
USERS = (1, 32)
DECODES_ON = {1: (1, 1), 8: (1, 8), 32: (8, 4)}
EPSILON = 1e-5


def works(devices: Sequence[int]) -> list[Spec]:
    """Every work on every number of devices."""
    found = []
    for count in devices:
        found.append(Spec("ttnn add", "32x32 per device", (count,), partial(_add, count), ADD, "extra_us"))
        if count > 1:
            found += [
                Spec("ttnn collective", name, (count,), partial(_collective, act, count), COLLECTIVE, "ours_us")
                for name, act in _COLLECTIVES.items()
            ]
        if count in DECODES_ON:
            found += [_decode_spec(DECODES_ON[count], users) for users in USERS]
        if count == 1:
            make = partial(_block_float, count)
            found.append(Spec("ttnn bfloat8_b", "add of 8M, to bfloat16", (count,), make, BLOCK_FLOAT, seconds=3.0))
    order = list(dict.fromkeys((spec.name, spec.detail) for spec in sorted(found, key=lambda spec: -spec.devices)))
    return sorted(found, key=lambda spec: order.index((spec.name, spec.detail)))


def _put(mesh: Any, value: torch.Tensor, dim: int | None = None, **how: Any) -> Any:
    mapper = ttnn.ReplicateTensorToMesh(mesh) if dim is None else ttnn.ShardTensorToMesh(mesh, dim=dim)
    how = {"dtype": ttnn.bfloat16, "layout": ttnn.TILE_LAYOUT, "mesh_mapper": mapper} | how
    return ttnn.from_torch(value, device=mesh, **how)


def _check(found: torch.Tensor, expected: torch.Tensor, what: str, rtol: float = 1e-4) -> None:
    if not torch.allclose(found.float(), expected.float(), rtol=rtol, atol=rtol):
        worst = (found.float() - expected.float()).abs().max().item()
        raise WrongAnswer(f"{what}: differs from torch by {worst:g}")


def _add(devices: int) -> Pair:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, devices))
    a, b = (_put(mesh, torch.randn(devices * SIDE, SIDE), 0) for _ in range(2))
    x, y = a.block, b.block
    _check(ttnn.add(a, b).block, x + y, "ttnn.add")
    return Pair(lambda: ttnn.add(a, b), lambda: torch.add(x, y))


_COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "all_gather": lambda x: ttnn.all_gather(x, dim=1),
    "all_reduce": lambda x: ttnn.all_reduce(x),
    "reduce_scatter": lambda x: ttnn.reduce_scatter(x, dim=1),
}


def _collective(act: Callable[[Any], Any], devices: int) -> Pair:
    """A small collective beside the copy of one device's part, which it has to make at least."""
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, devices))
    width = max(SIDE, devices)  # every device gets a piece of it
    x = _put(mesh, torch.randn(SIDE * SIDE // width, devices * width), 1)
    with ttnn.collective_mode("host"):
        expected = act(x).block
    _check(act(x).block, expected, "a collective of ttnn", rtol=2e-2)
    part = x.block[0, 0]
    return Pair(lambda: act(x), part.clone)


def _block_float(devices: int) -> Pair:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, devices))
    side = math.isqrt(ELEMENTS // 2)
    values = [torch.randn(side, 2 * side) for _ in range(2)]
    coarse = [_put(mesh, each, dtype=ttnn.bfloat8_b) for each in values]
    fine = [_put(mesh, each) for each in values]
    _check(ttnn.to_torch(ttnn.add(*coarse)), sum(values), "ttnn.add of bfloat8_b", rtol=1e-1)
    return Pair(lambda: ttnn.add(*coarse), lambda: ttnn.add(*fine))


# a Llama that decodes one token of every user


def _decode_spec(shape: tuple[int, int], users: int) -> Spec:
    detail = f"{LAYERS}-layer Llama, {users} user{'s' * (users > 1)}"
    return Spec("ttnn decode", detail, shape, partial(_decode, shape, users), DECODE, seconds=3.0)


def _decode(shape: tuple[int, int], users: int) -> Pair:
    weights, angles = _draw_weights(), _angles()
    x = torch.randn(users, WIDTH).bfloat16()
    caches = [torch.randn(users, KV_HEADS, LONGEST, HEAD).bfloat16() for _ in range(2 * LAYERS)]
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(*shape))
    ours, step = _Decoder(mesh, weights, angles, caches, x), _torch_decoder(weights, angles, caches, x)
    found, expected = ours.read(ours.step()), step()
    matched = torch.corrcoef(torch.stack([found.flatten(), expected.float().flatten()]))[0, 1].item()
    if matched < 0.999:
        raise WrongAnswer(f"a decoding step on {shape}: correlation {matched:g} with torch")
    return Pair(ours.step, step)


Weights = list[dict[str, torch.Tensor]]


def _draw_weights() -> Weights:
    """[in, out] in bfloat16, by layer."""

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns) / rows**0.5).bfloat16()

    wide, narrow = HEADS * HEAD, KV_HEADS * HEAD
    sizes = {"q": (WIDTH, wide), "k": (WIDTH, narrow), "v": (WIDTH, narrow), "o": (wide, WIDTH)}
    sizes |= {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    norms = ("attention norm", "norm")
    return [
        {name: weight(*size) for name, size in sizes.items()} | {name: 1 + weight(1, WIDTH)[0] / 10 for name in norms}
        for _ in range(LAYERS)
    ]


def _angles() -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position, [longest, head]; neighbours in a head turn together."""
    speed = 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    turn = torch.outer(torch.arange(LONGEST), speed).repeat_interleave(2, dim=1)
    return turn.cos().bfloat16(), turn.sin().bfloat16()


def _positions(users: int) -> torch.Tensor:
    return torch.arange(users) * 2 + 40


def _torch_decoder(
    weights: Weights, angles: tuple[torch.Tensor, torch.Tensor], caches: list[torch.Tensor], x: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """The step as one writes it in torch, in bfloat16."""
    position, users = _positions(len(x)), torch.arange(len(x))
    cos, sin = (each[position].unsqueeze(1) for each in angles)
    seen = (torch.arange(LONGEST) <= position[:, None])[:, None, None]
    caches = [each.clone() for each in caches]
    fused = [torch.cat([each["q"], each["k"], each["v"]], 1) for each in weights]

    def turn(h: torch.Tensor) -> torch.Tensor:
        pairs = h.unflatten(-1, (-1, 2))
        return h * cos + torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2) * sin

    def step() -> torch.Tensor:
        y = x
        for layer, w in enumerate(weights):
            keys, values = caches[2 * layer : 2 * layer + 2]
            h = F.rms_norm(y, (WIDTH,), w["attention norm"], EPSILON)
            q, k, v = (h @ fused[layer]).unflatten(-1, (-1, HEAD)).split((HEADS, KV_HEADS, KV_HEADS), 1)
            keys[users, :, position], values[users, :, position] = turn(k), v
            q = turn(q).unflatten(1, (KV_HEADS, -1))
            mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
            y = y + mixed.reshape(len(x), -1) @ w["o"]
            h = F.rms_norm(y, (WIDTH,), w["norm"], EPSILON)
            y = y + (F.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
        return y

    return step


class _Decoder:
    """The step in TTNN's spelling: heads and hidden dims are cut along the longer axis, the width along the other."""

    def __init__(
        self,
        mesh: Any,
        weights: Weights,
        angles: tuple[torch.Tensor, torch.Tensor],
        caches: list[torch.Tensor],
        x: torch.Tensor,
    ) -> None:
        self.mesh, self.shape = mesh, tuple(mesh.shape)
        self.heads_on = 0 if self.shape[0] > 1 else 1  # the axis that cuts heads
        self.ways = self.shape[self.heads_on]
        self.layers = [self._put_layer(each) for each in weights]
        self.caches = [self._map(each, heads=1) for each in caches]
        self.users = len(x)
        position = _positions(self.users)
        self.position = ttnn.from_torch(
            position.int(), dtype=ttnn.int32, device=mesh, mesh_mapper=ttnn.ReplicateTensorToMesh(mesh)
        )
        self.angles = [_put(mesh, each[position][None, :, None]) for each in angles]
        self.matrix = _put(mesh, _turn_neighbours()[None, None])
        self.x = self._map(x[None, None])

    def _map(self, value: torch.Tensor, heads: int | None = None) -> Any:
        dims: list[int | None] = [None, None]
        dims[self.heads_on] = heads
        return _put(self.mesh, value, mesh_mapper=ttnn.ShardTensor2dMesh(self.mesh, self.shape, dims=tuple(dims)))

    def _put_layer(self, w: dict[str, torch.Tensor]) -> dict[str, Any]:
        parts = (w[name].chunk(self.ways, 1) for name in "qkv")
        fused = torch.cat([torch.cat(mine, 1) for mine in zip(*parts, strict=True)], 1)
        first = {"qkv": fused, "gate": w["gate"], "up": w["up"]}
        made = {name: self._map(each[None, None], heads=3) for name, each in first.items()}
        made |= {name: self._map(w[name][None, None], heads=2) for name in ("o", "down")}
        norms = ("attention norm", "norm")
        return made | {name: _put(self.mesh, w[name].reshape(1, 1, 1, -1)) for name in norms}

    def step(self) -> Any:
        """One token of every user, [1, 1, users, width]."""
        x = self.x
        for layer, w in enumerate(self.layers):
            x = ttnn.add(x, self._attend(ttnn.rms_norm(x, weight=w["attention norm"], epsilon=EPSILON), w, layer))
            h = ttnn.rms_norm(x, weight=w["norm"], epsilon=EPSILON)
            gate = ttnn.linear(h, w["gate"], activation="silu")
            x = ttnn.add(x, self._sum(ttnn.linear(ttnn.multiply(gate, ttnn.linear(h, w["up"])), w["down"])))
        return x

    def _attend(self, h: Any, w: dict[str, Any], layer: int) -> Any:
        keys, values = self.caches[2 * layer : 2 * layer + 2]
        q, k, v = ttnn.experimental.nlp_create_qkv_heads_decode(
            ttnn.linear(h, w["qkv"]), num_heads=HEADS // self.ways, num_kv_heads=KV_HEADS // self.ways
        )
        q, k = (
            ttnn.experimental.rotary_embedding_llama(each, *self.angles, self.matrix, is_decode_mode=True)
            for each in (q, k)
        )
        ttnn.experimental.paged_update_cache(keys, k, update_idxs_tensor=self.position)
        ttnn.experimental.paged_update_cache(values, v, update_idxs_tensor=self.position)
        mixed = ttnn.transformer.scaled_dot_product_attention_decode(
            q, keys, values, cur_pos_tensor=self.position, scale=HEAD**-0.5
        )
        joined = ttnn.experimental.nlp_concat_heads_decode(mixed, num_heads=HEADS // self.ways)
        width = joined.shape[3]
        joined = ttnn.reshape(
            joined, (1, 1, self.users, width), (1, 1, SIDE, width)
        )  # rows beyond the users are padding
        return self._sum(ttnn.linear(joined, w["o"]))

    def _sum(self, x: Any) -> Any:
        return ttnn.all_reduce(x, cluster_axis=self.heads_on) if self.ways > 1 else x

    def read(self, x: Any) -> torch.Tensor:
        """[users, width] on the host."""
        return ttnn.to_torch(ttnn.get_device_tensors(x)[0])[0, 0].float()


def _turn_neighbours() -> torch.Tensor:
    """The matrix that makes (-b, a) of neighbours (a, b), of one tile."""
    matrix = torch.zeros(SIDE, SIDE)
    even = torch.arange(0, SIDE, 2)
    matrix[even, even + 1], matrix[even + 1, even] = 1.0, -1.0
    return matrix
