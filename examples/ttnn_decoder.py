"""A decoder layer in TTNN's spelling on a mesh: rows of the mesh cut the users, columns cut heads and hidden dims.

    python examples/ttnn_decoder.py
    python examples/ttnn_decoder.py --mesh 8x4 --users 16 --prompt 64 --tokens 8

RMS norm, rotary embedding, attention with shared heads of keys and values, a cache of them, SwiGLU. A prompt is read at
once, then tokens one by one from the cache; every result is compared with torch on the whole sequence. Two all-reduces
per layer go along the columns, nothing goes along the rows. The import is all that ties it to meshloom.
"""

from __future__ import annotations

import argparse
from collections import namedtuple
from typing import Any

import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom import ttnn

EPSILON = 1e-5


# The sizes of a layer.
SIZES = {"width": 256, "heads": 16, "kv_heads": 8, "head": 32, "hidden": 512, "longest": 128}
Config = namedtuple("Config", SIZES, defaults=SIZES.values())


class Layer:
    """The weights of a layer and what they mean, in torch."""

    def __init__(self, config: Config, dtype: torch.dtype = torch.bfloat16) -> None:
        draw = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=draw) / rows**0.5).to(dtype)

        self.config, self.dtype = config, dtype
        self.q = weight(config.width, config.heads * config.head)
        self.k, self.v = (weight(config.width, config.kv_heads * config.head) for _ in range(2))
        self.out = weight(config.heads * config.head, config.width)
        self.gate, self.up = (weight(config.width, config.hidden) for _ in range(2))
        self.down = weight(config.hidden, config.width)
        self.norms = [(1 + 0.1 * torch.randn(config.width, generator=draw)).to(dtype) for _ in range(2)]
        self.cos, self.sin = angles(config)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """What torch makes of whole sequences [users, length, width] in float32."""
        c = self.config
        x = x.float()
        h = F.rms_norm(x, (c.width,), self.norms[0].float(), EPSILON)
        q, k, v = (
            (h @ weight.float()).unflatten(-1, (-1, c.head)).transpose(1, 2) for weight in (self.q, self.k, self.v)
        )
        q, k = (self._rotated(each) for each in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + mixed.transpose(1, 2).flatten(2) @ self.out.float()
        h = F.rms_norm(x, (c.width,), self.norms[1].float(), EPSILON)
        return x + (F.silu(h @ self.gate.float()) * (h @ self.up.float())) @ self.down.float()

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = (each[: x.shape[-2]] for each in (self.cos, self.sin))
        return x * cos + torch.cat([-second, first], -1) * sin


def angles(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position, [longest, head]."""
    speed = 10000.0 ** (-torch.arange(0, config.head, 2) / config.head)
    turn = torch.outer(torch.arange(config.longest), speed).repeat(1, 2)
    return turn.cos(), turn.sin()


class Decoder:
    """A layer on a mesh, with a cache for a number of users."""

    def __init__(self, layer: Layer, mesh: Any, users: int) -> None:
        self.config, self.mesh, self.layer = layer.config, mesh, layer
        self.rows, self.columns = tuple(mesh.shape)
        c = self.config
        if c.kv_heads % self.columns or users % self.rows:
            raise SystemExit(f"{c.kv_heads} heads of keys and {users} users do not divide over {mesh}")
        self.heads, self.kv_heads, self.users = c.heads // self.columns, c.kv_heads // self.columns, users // self.rows
        self.qkv = self.placed(self._fused(), columns=1)
        self.out, self.down = self.placed(layer.out, columns=0), self.placed(layer.down, columns=0)
        self.gate, self.up = self.placed(layer.gate, columns=1), self.placed(layer.up, columns=1)
        self.norms = [self.placed(each) for each in layer.norms]
        self.cos, self.sin = (self.placed(each[None, None].to(layer.dtype)) for each in (layer.cos, layer.sin))
        empty = torch.zeros(users, c.kv_heads, c.longest, c.head, dtype=layer.dtype)
        self.keys, self.values = (self.placed(empty, rows=0, columns=1) for _ in range(2))

    def placed(self, x: torch.Tensor, rows: int | None = None, columns: int | None = None, **options: Any) -> Any:
        """A tensor on the mesh: the dim that its rows cut, and the dim that its columns cut."""
        mapper = ttnn.ShardTensor2dMesh(self.mesh, (self.rows, self.columns), dims=(rows, columns))
        return ttnn.from_torch(x, device=self.mesh, mesh_mapper=mapper, **{"layout": ttnn.TILE_LAYOUT, **options})

    def _fused(self) -> torch.Tensor:
        """Queries, keys and values of each column's heads side by side, so that one cut gives every column its own."""
        chunks = (each.chunk(self.columns, 1) for each in (self.layer.q, self.layer.k, self.layer.v))
        return torch.cat([torch.cat(mine, 1) for mine in zip(*chunks, strict=True)], 1)

    def prefill(self, x: torch.Tensor) -> torch.Tensor:
        """Prompts of all users at once, [users, length, width]; their keys and values go to the cache."""
        x_tt = self.placed(x[:, None], rows=0)
        h = ttnn.rms_norm(x_tt, weight=self.norms[0], epsilon=EPSILON)
        q, k, v = ttnn.experimental.nlp_create_qkv_heads(
            ttnn.linear(h, self.qkv), num_heads=self.heads, num_kv_heads=self.kv_heads, transpose_k_heads=False
        )
        q, k = (ttnn.experimental.rotary_embedding_hf(each, self.cos, self.sin) for each in (q, k))
        for user in range(self.users):
            for cache, new in ((self.keys, k), (self.values, v)):
                ttnn.fill_cache(cache, ttnn.slice(new, [user, 0, 0, 0], [user + 1, *new.shape[1:]]), user)
        mixed = ttnn.transformer.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_tt = ttnn.add(x_tt, self._summed(ttnn.linear(ttnn.experimental.nlp_concat_heads(mixed), self.out)))
        return ttnn.to_torch(self._fed(x_tt))[:, 0]

    def decode(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """One token of every user, [users, width], all at one position."""
        x_tt = self.placed(x[None, None], rows=2)
        h = ttnn.rms_norm(x_tt, weight=self.norms[0], epsilon=EPSILON)
        q, k, v = ttnn.experimental.nlp_create_qkv_heads_decode(
            ttnn.linear(h, self.qkv), num_heads=self.heads, num_kv_heads=self.kv_heads
        )
        turn = [
            self.placed(each[position].expand(1, len(x), 1, -1).to(self.layer.dtype), rows=1)
            for each in (self.layer.cos, self.layer.sin)
        ]
        q, k = (ttnn.experimental.rotary_embedding_hf(each, *turn, is_decode_mode=True) for each in (q, k))
        at = self.placed(torch.full((len(x),), position), rows=0, dtype=ttnn.int32, layout=ttnn.ROW_MAJOR_LAYOUT)
        for cache, new in ((self.keys, k), (self.values, v)):
            ttnn.experimental.paged_update_cache(cache, new, update_idxs_tensor=at)
        mixed = ttnn.transformer.scaled_dot_product_attention_decode(q, self.keys, self.values, cur_pos_tensor=at)
        joined = ttnn.experimental.nlp_concat_heads_decode(mixed, num_heads=self.heads)  # of 32 users, there or not
        joined = joined[:, :, : x_tt.shape[2]]
        x_tt = ttnn.add(x_tt, self._summed(ttnn.linear(joined, self.out)))
        return ttnn.to_torch(self._fed(x_tt))[0, 0]

    def _fed(self, x: Any) -> Any:
        """SwiGLU and its residual."""
        h = ttnn.rms_norm(x, weight=self.norms[1], epsilon=EPSILON)
        gated = ttnn.multiply(ttnn.linear(h, self.gate, activation="silu"), ttnn.linear(h, self.up))
        return ttnn.add(x, self._summed(ttnn.linear(gated, self.down)))

    def _summed(self, terms: Any) -> Any:
        return ttnn.all_reduce(terms, cluster_axis=1)


def correlation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's coefficient."""
    return float(torch.corrcoef(torch.stack([found.float().flatten(), expected.float().flatten()]))[0, 1])


def sequences(config: Config, users: int, length: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Inputs of all users, [users, length, width]."""
    return torch.randn(users, length, config.width, generator=torch.Generator().manual_seed(1)).to(dtype)


def main() -> None:
    """Read a prompt, then some tokens, and compare with torch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2x4", help="rows x columns of the mesh (default 2x4)")
    counts = {
        "users": (8, "how many sequences"),
        "prompt": (32, "tokens read at once"),
        "tokens": (4, "then one by one"),
    }
    for name, (count, what) in counts.items():
        parser.add_argument(f"--{name}", type=int, default=count, help=f"{what} (default {count})")
    options = parser.parse_args()
    layer = Layer(Config())
    x = sequences(layer.config, options.users, options.prompt + options.tokens)
    expected = layer.reference(x)
    with ttnn.create_mesh_device(ttnn.MeshShape(*map(int, options.mesh.split("x")))) as mesh:
        print(mesh)
        decoder = Decoder(layer, mesh, options.users)
        with loom.record() as log:
            found = decoder.prefill(x[:, : options.prompt])
        told = f"{log.kinds()['all_reduce']} all-reduces, {log.bytes} B received by a device"
        print(f"prompt    PCC {correlation(found, expected[:, : options.prompt]):.6f}, {told}")
        for position in range(options.prompt, options.prompt + options.tokens):
            found = decoder.decode(x[:, position], position)
            print(f"token {position:>3} PCC {correlation(found, expected[:, position]):.6f}")


if __name__ == "__main__":
    main()
