"""A Llama in TTNN's spelling that writes text: pages of keys and values, and a trace that is replayed for every token.

    python examples/ttnn_llama.py
    python examples/ttnn_llama.py --mesh 8x4 --users 4 --tokens 16
    python examples/ttnn_llama.py --mesh 1x1 --cache /tmp/weights

On a line of devices the first weight of a pair is cut by columns and the second by rows: sums are scattered over the
width (reduce_scatter) and gathered before the next product. On a grid its rows cut heads and hidden dims and its
columns cut the width, so that every product ends in a sum along one of the two. Norms are distributed: statistics are
gathered, not the activations. The prompt of a user is read at once into its pages; then every replay of one trace
decodes a token of every user, from inputs that are written where they were captured. The weights are random, so the
text is noise, but it is the noise that torch writes: logits are compared with torch in float32.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from meshloom import ttnn

EPSILON = 1e-5
TILE = 32
PROMPTS = ["A mesh is a grid", "Every device holds", "The block is one array of shape", "Nothing is hidden"]


# The sizes of a model; tokens are bytes.
SIZES = {"width": 512, "heads": 16, "kv_heads": 8, "head": 32, "hidden": 1024, "layers": 2, "vocabulary": 256}
PAGES = {"longest": 128, "page": 32}
Config = namedtuple("Config", [*SIZES, *PAGES], defaults=[*SIZES.values(), *PAGES.values()])


State = dict[str, torch.Tensor]


# what torch makes of it


def draw_weights(config: Config) -> State:
    """Weights [in, out] in bfloat16 by the names that checkpoints have for them."""
    draw = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=draw) / rows**0.5).bfloat16()

    def norm() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(config.width, generator=draw)).bfloat16()

    state = {
        "tok_embeddings": torch.randn(config.vocabulary, config.width, generator=draw).bfloat16(),
        "norm": norm(),
        "output": weight(config.width, config.vocabulary),
    }
    for layer in range(config.layers):
        kinds = {
            "attention_norm": norm(),
            "wq": weight(config.width, config.heads * config.head),
            "wk": weight(config.width, config.kv_heads * config.head),
            "wv": weight(config.width, config.kv_heads * config.head),
            "wo": weight(config.heads * config.head, config.width),
            "ffn_norm": norm(),
            "w1": weight(config.width, config.hidden),
            "w3": weight(config.width, config.hidden),
            "w2": weight(config.hidden, config.width),
        }
        state |= {f"layers.{layer}.{name}": each for name, each in kinds.items()}
    return state


def angles(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position, [longest, head]; neighbours in a head turn together."""
    speed = 10000.0 ** (-torch.arange(0, config.head, 2) / config.head)
    turn = torch.outer(torch.arange(config.longest), speed).repeat_interleave(2, dim=1)
    return turn.cos(), turn.sin()


def turn_neighbours() -> torch.Tensor:
    """The matrix that makes (-b, a) of neighbours (a, b), of one tile."""
    matrix = torch.zeros(TILE, TILE)
    even = torch.arange(0, TILE, 2)
    matrix[even, even + 1], matrix[even + 1, even] = 1.0, -1.0
    return matrix


def reference(state: State, config: Config, tokens: list[int]) -> torch.Tensor:
    """Logits [length, vocabulary] of a whole text in float32."""
    w = {name: each.float() for name, each in state.items()}
    cos, sin = (each[: len(tokens)] for each in angles(config))
    turn = torch.block_diag(*[turn_neighbours()] * (config.head // TILE))
    x = w["tok_embeddings"][torch.tensor(tokens)]
    for layer in range(config.layers):
        at = f"layers.{layer}."
        h = F.rms_norm(x, (config.width,), w[at + "attention_norm"], EPSILON)
        q, k, v = ((h @ w[at + name]).unflatten(-1, (-1, config.head)).transpose(0, 1) for name in ("wq", "wk", "wv"))
        q, k = (each * cos + each @ turn * sin for each in (q, k))
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        x = x + mixed.transpose(0, 1).flatten(1) @ w[at + "wo"]
        h = F.rms_norm(x, (config.width,), w[at + "ffn_norm"], EPSILON)
        x = x + (F.silu(h @ w[at + "w1"]) * (h @ w[at + "w3"])) @ w[at + "w2"]
    return F.rms_norm(x, (config.width,), w["norm"], EPSILON) @ w["output"]


# how it lies on a mesh


class Parallel:
    """How tensors lie on a mesh, and the collectives between products.

    The residual is cut at the width along the columns of the mesh. On a line, heads and hidden dims are cut along the
    same axis, on a grid along its rows.
    """

    def __init__(self, mesh: Any) -> None:
        self.mesh, self.shape = mesh, tuple(mesh.shape)
        self.is_grid, self.is_line = self.shape[0] > 1, self.shape[0] == 1 < self.shape[1]
        self.has_columns = self.is_grid and self.shape[1] > 1
        self.ways = self.shape[0] if self.is_grid else self.shape[1]  # that heads and hidden dims are cut

    def mapper(self, rows: int | None = None, columns: int | None = None) -> Any:
        """The dims that rows and columns of the mesh cut."""
        return ttnn.ShardTensor2dMesh(self.mesh, self.shape, dims=(rows, columns))

    @property
    def first(self) -> Any:
        """Of a weight whose result is cut: [1, 1, width, heads]."""
        return self.mapper(3, 2) if self.is_grid else self.mapper(None, 3)

    @property
    def second(self) -> Any:
        """Of a weight that takes what is cut: [1, 1, heads, width]."""
        return self.mapper(2, 3) if self.is_grid else self.mapper(None, 2)

    def gather_width(self, x: Any) -> Any:
        """What the first product on a line takes: the whole width."""
        return ttnn.all_gather(x, dim=3, cluster_axis=1) if self.is_line else x

    def sum_first(self, x: Any) -> Any:
        """The first product on a grid is a sum along its columns."""
        return ttnn.all_reduce(x, cluster_axis=1) if self.has_columns else x

    def sum_second(self, x: Any) -> Any:
        """The second product is a sum, of which a device keeps its part of the width."""
        if self.is_line:
            return ttnn.reduce_scatter(x, dim=3, cluster_axis=1)
        return ttnn.all_reduce(x, cluster_axis=0) if self.is_grid else x

    def read_logits(self, logits: Any) -> torch.Tensor:
        """[1, 1, rows, vocabulary] on the host: parts along one axis, one copy along the other."""
        dims = (3, 1) if self.is_grid else (1, 3)
        composer = ttnn.ConcatMesh2dToTensor(self.mesh, self.shape, dims=dims)
        return ttnn.to_torch(logits, mesh_composer=composer)[:, :1].float()


class Weights:
    """Weights of a model on a mesh, from files if they were made before."""

    def __init__(self, state: State, parallel: Parallel, cache: Path) -> None:
        self.state, self.parallel, self.cache = state, parallel, cache
        self.shape = "x".join(map(str, parallel.shape))

    def put(self, name: str, value: torch.Tensor, mapper: Any, layout: Any = ttnn.TILE_LAYOUT) -> Any:
        """A weight as the mapper cuts it."""
        return ttnn.as_tensor(
            value,
            dtype=ttnn.bfloat16,
            layout=layout,
            device=self.parallel.mesh,
            memory_config=ttnn.DRAM_MEMORY_CONFIG,
            mesh_mapper=mapper,
            cache_file_name=self.cache / self.shape / name,
        )

    def first(self, name: str) -> Any:
        """A weight whose result is cut."""
        return self.put(name, self.state[name][None, None], self.parallel.first)

    def second(self, name: str) -> Any:
        """A weight that takes what is cut."""
        return self.put(name, self.state[name][None, None], self.parallel.second)

    def norm(self, name: str) -> Any:
        """A weight of a norm: rows of a tile's width."""
        rows = self.state[name].reshape(1, 1, -1, TILE)
        return self.put(name, rows, self.parallel.mapper(None, 2), ttnn.ROW_MAJOR_LAYOUT)

    def qkv(self, at: str) -> Any:
        """Queries, keys and values of each device's heads side by side, so that one cut gives every device its own."""
        parts = (self.state[at + name].chunk(self.parallel.ways, 1) for name in ("wq", "wk", "wv"))
        fused = torch.cat([torch.cat(mine, 1) for mine in zip(*parts, strict=True)], 1)
        return self.put(at + "wqkv", fused[None, None], self.parallel.first)


# the model


class RMSNorm:
    """The norm of a width that is cut."""

    def __init__(self, weight: Any, parallel: Parallel) -> None:
        self.weight, self.ways = weight, parallel.shape[1]

    def __call__(self, x: Any) -> Any:
        if self.ways == 1:
            return ttnn.rms_norm(x, weight=self.weight, epsilon=EPSILON)
        stats = ttnn.rms_norm_pre_all_gather(x, dtype=ttnn.bfloat16)
        stats = ttnn.all_gather(stats, dim=3, cluster_axis=1)
        return ttnn.rms_norm_post_all_gather(x, stats, epsilon=EPSILON, weight=self.weight)


class Rotary:
    """Angles by position, and the matrices that turn neighbours."""

    def __init__(self, config: Config, parallel: Parallel, users: int) -> None:
        self.config, self.parallel, self.users = config, parallel, users
        self.by_user = by_user(parallel.mesh, users, config.head)
        self.caches = [each[None, None].bfloat16() for each in angles(config)]
        self.tables = [self._put(each, ttnn.ROW_MAJOR_LAYOUT) for each in self.caches]
        matrix = turn_neighbours()[None, None].bfloat16()
        self.matrix = self._put(matrix, ttnn.TILE_LAYOUT)
        self.matrices = self._put(matrix.repeat(1, 1, users, 1), ttnn.TILE_LAYOUT, by_user(parallel.mesh, users, TILE))

    def _put(self, value: torch.Tensor, layout: Any, memory_config: Any = ttnn.DRAM_MEMORY_CONFIG) -> Any:
        mesh = self.parallel.mesh
        everywhere = ttnn.ReplicateTensorToMesh(mesh)
        return ttnn.from_torch(
            value, dtype=ttnn.bfloat16, layout=layout, device=mesh, memory_config=memory_config, mesh_mapper=everywhere
        )

    def of_prompt(self, length: int) -> list[Any]:
        """Cosines, sines and the matrix for the first positions."""
        return [*(self._put(each[:, :, :length], ttnn.TILE_LAYOUT) for each in self.caches), self.matrix]

    def of_users(self, positions: Any) -> list[Any]:
        """Cosines, sines and matrices of one token of every user, a user per core: the device looks them up."""
        found = []
        for table in self.tables:
            rows = ttnn.unsqueeze_to_4D(ttnn.embedding(positions, table, layout=ttnn.TILE_LAYOUT))  # [1, 1, 32, head]
            each = ttnn.transpose(rows, 1, 2)[:, : self.users]  # [1, users, 1, head]
            found.append(ttnn.interleaved_to_sharded(each, self.by_user))
        return [*found, self.matrices]


def by_user(mesh: Any, users: int, width: int) -> Any:
    """One user's heads on each core."""
    return ttnn.create_sharded_memory_config(
        shape=(TILE, width),
        core_grid=ttnn.num_cores_to_corerangeset(users, mesh.compute_with_storage_grid_size(), row_wise=True),
        strategy=ttnn.ShardStrategy.HEIGHT,
        orientation=ttnn.ShardOrientation.ROW_MAJOR,
        use_height_and_width_as_shard_shape=True,
    )


class Attention:
    """Attention with shared heads of keys and values, which lie in pages."""

    def __init__(self, at: str, weights: Weights, config: Config, users: int) -> None:
        self.config, self.parallel, self.users = config, weights.parallel, users
        self.heads, self.kv_heads = config.heads // self.parallel.ways, config.kv_heads // self.parallel.ways
        self.wqkv, self.wo = weights.qkv(at), weights.second(at + "wo")
        self.by_user = by_user(self.parallel.mesh, users, config.head)
        self.keys, self.values = self._pages(), self._pages()

    def _pages(self) -> Any:
        c = self.config
        count = self.users * c.longest // c.page
        return ttnn.from_torch(
            torch.zeros(count, self.kv_heads, c.page, c.head),
            dtype=ttnn.bfloat16,
            layout=ttnn.TILE_LAYOUT,
            device=self.parallel.mesh,
            memory_config=ttnn.DRAM_MEMORY_CONFIG,
            mesh_mapper=ttnn.ReplicateTensorToMesh(self.parallel.mesh),
        )

    def prefill(self, x: Any, rotation: list[Any], table: Any, user: int) -> Any:
        """The prompt of one user, [1, 1, length, width]."""
        fused = self.parallel.sum_first(ttnn.linear(x, self.wqkv))
        q, k, v = ttnn.experimental.nlp_create_qkv_heads(
            fused, num_heads=self.heads, num_kv_heads=self.kv_heads, transpose_k_heads=False
        )
        ttnn.deallocate(fused)
        q, k = (ttnn.experimental.rotary_embedding_llama(each, *rotation, is_decode_mode=False) for each in (q, k))
        ttnn.experimental.paged_fill_cache(self.keys, k, table, batch_idx=user)
        ttnn.experimental.paged_fill_cache(self.values, v, table, batch_idx=user)
        mixed = ttnn.transformer.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.config.head**-0.5)
        joined = ttnn.experimental.nlp_concat_heads(mixed)
        return self.parallel.sum_second(ttnn.linear(joined, self.wo))

    def decode(self, x: Any, rotation: list[Any], table: Any, positions: Any) -> Any:
        """One token of every user, [1, 1, 32, width]: rows beyond the users are padding."""
        fused = self.parallel.sum_first(ttnn.linear(x, self.wqkv))
        width = fused.shape[3]
        fused = ttnn.reshape(fused, (1, 1, self.users, width), (1, 1, TILE, width))
        q, k, v = ttnn.experimental.nlp_create_qkv_heads_decode(
            fused, num_heads=self.heads, num_kv_heads=self.kv_heads, memory_config=ttnn.L1_HEIGHT_SHARDED_MEMORY_CONFIG
        )
        ttnn.deallocate(fused)
        q, k = (ttnn.experimental.rotary_embedding_llama(each, *rotation, is_decode_mode=True) for each in (q, k))
        for cache, new in ((self.keys, k), (self.values, v)):
            ttnn.experimental.paged_update_cache(cache, new, update_idxs_tensor=positions, page_table=table)
        mixed = ttnn.transformer.paged_scaled_dot_product_attention_decode(
            q, self.keys, self.values, table, cur_pos_tensor=positions, scale=self.config.head**-0.5
        )
        mixed = ttnn.to_memory_config(mixed, self.by_user)
        joined = ttnn.experimental.nlp_concat_heads_decode(mixed, num_heads=self.heads)
        joined = ttnn.to_memory_config(joined, ttnn.L1_MEMORY_CONFIG)
        return self.parallel.sum_second(ttnn.linear(joined, self.wo))


class MLP:
    """SwiGLU."""

    def __init__(self, at: str, weights: Weights) -> None:
        self.parallel = weights.parallel
        self.w1, self.w3, self.w2 = weights.first(at + "w1"), weights.first(at + "w3"), weights.second(at + "w2")

    def __call__(self, x: Any) -> Any:
        gate, up = ttnn.linear(x, self.w1), ttnn.linear(x, self.w3)
        if self.parallel.has_columns:  # each column sums a part, multiplies that, and gets the others' parts
            gate, up = (ttnn.reduce_scatter(each, dim=3, cluster_axis=1) for each in (gate, up))
        gated = ttnn.multiply(gate, up, input_tensor_a_activations=[ttnn.UnaryOpType.SILU])
        ttnn.deallocate(gate)
        ttnn.deallocate(up)
        if self.parallel.has_columns:
            gated = ttnn.all_gather(gated, dim=3, cluster_axis=1)
        return self.parallel.sum_second(ttnn.linear(gated, self.w2))


class Layer:
    """Attention and SwiGLU, each after a norm and around a residual."""

    def __init__(self, number: int, weights: Weights, config: Config, users: int) -> None:
        at, self.parallel = f"layers.{number}.", weights.parallel
        self.norms = [RMSNorm(weights.norm(at + name), self.parallel) for name in ("attention_norm", "ffn_norm")]
        self.attention, self.mlp = Attention(at, weights, config, users), MLP(at, weights)

    def __call__(self, x: Any, *where: Any, is_decode: bool) -> Any:
        attend = self.attention.decode if is_decode else self.attention.prefill
        mixed = attend(self.parallel.gather_width(self.norms[0](x)), *where)
        x = ttnn.add(x, mixed)
        ttnn.deallocate(mixed)
        return ttnn.add(x, self.mlp(self.parallel.gather_width(self.norms[1](x))))


class Llama:
    """A model for a number of users, with pages for all that they can write."""

    def __init__(self, state: State, config: Config, mesh: Any, users: int, cache: Path) -> None:
        self.config, self.mesh, self.users, self.parallel = config, mesh, users, Parallel(mesh)
        if config.kv_heads % self.parallel.ways:
            raise SystemExit(f"{config.kv_heads} heads of keys do not divide over {mesh}")
        weights = Weights(state, self.parallel, cache)
        table = state["tok_embeddings"][None, None]
        self.embeddings = weights.put(
            "tok_embeddings", table, self.parallel.mapper(None, 3), layout=ttnn.ROW_MAJOR_LAYOUT
        )
        self.layers = [Layer(number, weights, config, users) for number in range(config.layers)]
        self.norm, self.output = RMSNorm(weights.norm("norm"), self.parallel), weights.first("output")
        self.rotary = Rotary(config, self.parallel, users)
        pages = torch.randperm(users * config.longest // config.page, generator=torch.Generator().manual_seed(1))
        self.pages = pages.reshape(users, -1).int()  # of each user, in any order
        self.trace: Any = None

    def host(self, value: torch.Tensor, dtype: Any = ttnn.uint32) -> Any:
        """Integers for all devices, still on the host."""
        return ttnn.from_torch(value, dtype=dtype, mesh_mapper=ttnn.ReplicateTensorToMesh(self.mesh))

    def prefill(self, prompt: list[int], user: int) -> torch.Tensor:
        """Read a prompt into the pages of a user; logits [vocabulary] of what comes next."""
        missing = -len(prompt) % TILE
        tokens = self.host(torch.tensor([*prompt, *[0] * missing])[None])
        tokens, table = (ttnn.to_device(each, self.mesh) for each in (tokens, self.host(self.pages, ttnn.int32)))
        x = self.embed(tokens)
        rotation = self.rotary.of_prompt(len(prompt) + missing)
        for layer in self.layers:
            x = layer(x, rotation, table, user, is_decode=False)
        last = len(prompt) - 1
        start = last // TILE * TILE
        x = ttnn.slice(x, (0, 0, start, 0), (1, 1, start + TILE, x.shape[3]))
        return self.parallel.read_logits(self.score(x))[0, 0, last - start]

    def embed(self, tokens: Any) -> Any:
        """[1, length] as [1, 1, length, width]."""
        return ttnn.unsqueeze_to_4D(ttnn.embedding(tokens, self.embeddings, layout=ttnn.TILE_LAYOUT))

    def score(self, x: Any) -> Any:
        """Logits, cut at the vocabulary."""
        h = self.parallel.gather_width(self.norm(x))
        return self.parallel.sum_first(ttnn.linear(h, self.output))

    def step(self, tokens: Any, positions: Any, angles_at: Any, table: Any) -> tuple[Any, Any]:
        """One token of every user: logits of what comes next, and the likeliest token."""
        x, rotation = self.embed(tokens), self.rotary.of_users(angles_at)
        for layer in self.layers:
            x = layer(x, rotation, table, positions, is_decode=True)
        logits = self.score(x)
        whole = logits
        if self.parallel.ways > 1:
            whole = ttnn.all_gather(logits, dim=3, cluster_axis=0 if self.parallel.is_grid else 1)
        return logits, ttnn.argmax(ttnn.to_layout(whole, ttnn.ROW_MAJOR_LAYOUT), dim=3, keepdim=True)

    def inputs(self, tokens: list[int], positions: list[int]) -> list[Any]:
        """What `step` takes, on the host; rows beyond the users are padding."""
        missing = [0] * (TILE - self.users)
        return [
            self.host(torch.tensor([*tokens, *missing])[None]),
            self.host(torch.tensor(positions), ttnn.int32),
            self.host(torch.tensor([*positions, *missing])[None]),
            self.host(self.pages, ttnn.int32),
        ]

    def capture(self, tokens: list[int], positions: list[int]) -> None:
        """Run `step` once, so that all is compiled, then capture it: from now on `decode` replays it."""
        self.device_inputs = [ttnn.to_device(each, self.mesh) for each in self.inputs(tokens, positions)]
        self.step(*self.device_inputs)
        ttnn.synchronize_device(self.mesh)
        self.trace = ttnn.begin_trace_capture(self.mesh, cq_id=0)
        self.outputs = self.step(*self.device_inputs)
        ttnn.end_trace_capture(self.mesh, self.trace, cq_id=0)

    def decode(self, tokens: list[int], positions: list[int]) -> tuple[torch.Tensor, list[int]]:
        """One token of every user: logits [users, vocabulary] of what comes next, and the likeliest token."""
        if self.trace is None:
            self.capture(tokens, positions)
        for host, device in zip(self.inputs(tokens, positions), self.device_inputs, strict=True):
            ttnn.copy_host_to_device_tensor(host, device)
        ttnn.execute_trace(self.mesh, self.trace, cq_id=0, blocking=False)
        logits, chosen = self.outputs
        one = ttnn.to_torch(ttnn.get_device_tensors(chosen)[0])
        return self.parallel.read_logits(logits)[0, 0, : self.users], one.flatten()[: self.users].int().tolist()

    def release(self) -> None:
        """Let the trace go."""
        if self.trace is not None:
            ttnn.release_trace(self.mesh, self.trace)
            self.trace = None


def generate(model: Llama, prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy text of every user: its tokens, and the logits [1 + count, vocabulary] that they come from."""
    logits = [[model.prefill(prompt, user)] for user, prompt in enumerate(prompts)]
    texts = [[*prompt, int(logits[user][0].argmax())] for user, prompt in enumerate(prompts)]
    for _ in range(count):
        found, chosen = model.decode([text[-1] for text in texts], [len(text) - 1 for text in texts])
        for user, text in enumerate(texts):
            logits[user].append(found[user])
            text.append(chosen[user])
    model.release()
    return texts, [torch.stack(each) for each in logits]


def correlation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's coefficient."""
    return float(torch.corrcoef(torch.stack([found.float().flatten(), expected.float().flatten()]))[0, 1])


def encode(prompts: list[str], users: int) -> list[list[int]]:
    """A prompt for every user, as bytes."""
    return [list(prompts[user % len(prompts)].encode()) for user in range(users)]


def open_mesh(text: str) -> Any:
    """A mesh of rows x columns, with a fabric if there are several devices."""
    rows, columns = map(int, text.split("x"))
    if rows * columns > 1:
        ttnn.set_fabric_config(ttnn.FabricConfig.FABRIC_1D)
    return ttnn.open_mesh_device(ttnn.MeshShape(rows, columns), trace_region_size=1 << 24)


def run(options: argparse.Namespace, mesh: Any, cache: Path) -> None:
    """Write some text on a mesh and compare it with torch."""
    config = Config()
    state = draw_weights(config)
    prompts = encode([options.prompt] if options.prompt else PROMPTS, options.users)
    model = Llama(state, config, mesh, options.users, cache)
    longest = max(map(len, prompts)) + 1 + options.tokens
    if longest > config.longest:
        raise SystemExit(
            f"a text of {longest} tokens is longer than {config.longest}: a shorter --prompt, or fewer --tokens"
        )
    texts, logits = generate(model, prompts, options.tokens)
    for user, (text, found) in enumerate(zip(texts, logits, strict=True)):
        expected = reference(state, config, text[:-1])[-len(found) :]
        same = int((found.argmax(-1) == expected.argmax(-1)).sum())
        print(
            f"user {user}: prompt PCC {correlation(found[0], expected[0]):.6f}, {len(found) - 1} tokens replayed "
            f"PCC {correlation(found[1:], expected[1:]):.6f}, {same} of {len(found)} choices are torch's"
        )
        print(f"  {bytes(text).decode(errors='replace')!r}")


def main() -> None:
    """Read the options, open the mesh, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="1x8", help="rows x columns of the mesh (default 1x8)")
    parser.add_argument("--users", type=int, default=2, choices=range(1, 33), metavar="1..32", help="texts (default 2)")
    parser.add_argument("--prompt", default="", help="what all texts begin with (default: one of four sentences)")
    parser.add_argument("--tokens", type=int, default=8, help="tokens written by replaying the trace (default 8)")
    parser.add_argument("--cache", type=Path, help="a folder that keeps the weights as they lie on a mesh")
    options = parser.parse_args()
    mesh = open_mesh(options.mesh)
    print(mesh)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(options, mesh, options.cache or Path(folder))
    finally:
        ttnn.close_mesh_device(mesh)
        ttnn.set_fabric_config(ttnn.FabricConfig.DISABLED)


if __name__ == "__main__":
    main()
