"""A mixture of experts in TTNN's spelling: tokens go to the devices of the experts that they chose, and back.

    python examples/ttnn_moe.py
    python examples/ttnn_moe.py --mesh 4x2 --experts 128 --chosen 8

The rows of the mesh cut the tokens, its columns hold copies of them, and the experts are dealt out to all devices. Each
column sends its tokens (all_to_all_dispatch) to those experts that are in it, which work only on the runs of tokens
that chose them (sparse_matmul), and brings the results back to the tokens' devices (all_to_all_combine) into slots that
are zero where an expert is in another column. The weighted sum over slots and columns is compared with torch in
float32.
"""

from __future__ import annotations

import argparse
from collections import namedtuple
from typing import Any

import torch
import torch.nn.functional as F

from meshloom import ttnn

TILE = 32


# The sizes of a block.
SIZES = {"width": 128, "hidden": 128, "experts": 64, "chosen": 4}
Config = namedtuple("Config", SIZES, defaults=SIZES.values())


class Block:
    """The weights of a block and what they mean, in torch."""

    def __init__(self, config: Config) -> None:
        draw = torch.Generator().manual_seed(0)
        c, self.config = config, config
        self.router = torch.randn(c.width, c.experts, generator=draw).bfloat16()
        self.gate, self.up = (
            (torch.randn(c.experts, c.width, c.hidden, generator=draw) / c.width**0.5).bfloat16() for _ in range(2)
        )
        self.down = (torch.randn(c.experts, c.hidden, c.width, generator=draw) / c.hidden**0.5).bfloat16()

    def shares(self, x: torch.Tensor) -> torch.Tensor:
        """How much of a token each expert would get, in float32."""
        return torch.softmax(x.float() @ self.router.float() / self.config.width**0.5, -1)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """What torch makes of tokens [count, width] in float32."""
        weights, chosen = self.shares(x).topk(self.config.chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        every = torch.einsum(
            "ceh,ehw->cew",
            F.silu(torch.einsum("cw,ewh->ceh", x.float(), self.gate.float()))
            * torch.einsum("cw,ewh->ceh", x.float(), self.up.float()),
            self.down.float(),
        )
        picked = every.take_along_dim(chosen[..., None], 1)
        return (picked * weights[..., None]).sum(1)

    def draw_tokens(self, count: int) -> torch.Tensor:
        """Tokens [count, width] whose choice is clear: where bfloat16 makes two experts equal, either is right."""
        x = torch.randn(4 * count, self.config.width, generator=torch.Generator().manual_seed(1)).bfloat16()
        best = self.shares(x).topk(self.config.chosen + 1).values
        is_clear = (best[:, -2] - best[:, -1]) / best[:, -2] > 0.02
        return x[is_clear][:count]


class Experts:
    """A block on a mesh, for a number of tokens on each row."""

    def __init__(self, block: Block, mesh: Any, tokens: int) -> None:
        self.config, self.mesh, self.shape, self.tokens = block.config, mesh, tuple(mesh.shape), tokens
        devices = mesh.get_num_devices()
        if 1 in self.shape or block.config.experts % devices:
            raise SystemExit(f"{block.config.experts} experts do not divide over rows and columns of {mesh}")
        if tokens % TILE:
            raise SystemExit(f"{tokens} tokens on each row of {mesh} are no multiple of {TILE}")
        self.router = self.put(block.router[None, None] / block.config.width**0.5)
        dealt = ttnn.ShardTensorToMesh(mesh, dim=1)
        self.gate, self.up, self.down = (self.put(each[None], dealt) for each in (block.gate, block.up, block.down))
        owners = torch.eye(devices).repeat_interleave(block.config.experts // devices, 0)
        self.owners = self.put(owners[None, None], dtype=ttnn.uint16, layout=ttnn.ROW_MAJOR_LAYOUT)
        slots = torch.zeros(block.config.chosen, tokens, 1, block.config.width)
        self.slots = self.put(slots, layout=ttnn.ROW_MAJOR_LAYOUT)
        everyone = torch.ones(1, tokens * self.shape[0], 1, block.config.experts)
        self.everyone = self.put(everyone, layout=ttnn.ROW_MAJOR_LAYOUT)

    def put(
        self, x: torch.Tensor, mapper: Any = None, dtype: Any = ttnn.bfloat16, layout: Any = ttnn.TILE_LAYOUT
    ) -> Any:
        """A tensor on the mesh, on all devices unless a mapper cuts it."""
        mapper = mapper or ttnn.ReplicateTensorToMesh(self.mesh)
        return ttnn.from_torch(x, dtype=dtype, layout=layout, device=self.mesh, mesh_mapper=mapper)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """[count, width] to [count, width]."""
        return self.read(self.forward(ttnn.to_device(self.host(tokens), self.mesh)))

    def host(self, tokens: torch.Tensor) -> Any:
        """Tokens as the rows of the mesh cut them, [tokens of a row, 1, 1, width], still on the host."""
        rows = ttnn.ShardTensor2dMesh(self.mesh, self.shape, dims=(0, None))
        return ttnn.from_torch(tokens[:, None, None], dtype=ttnn.bfloat16, mesh_mapper=rows)

    def read(self, y: Any) -> torch.Tensor:
        """[1, tokens of a row, 1, width] of all rows; columns are copies."""
        composer = ttnn.ConcatMesh2dToTensor(self.mesh, self.shape, dims=(1, 0))
        return ttnn.to_torch(y, mesh_composer=composer)[0, :, 0]

    def forward(self, x: Any) -> Any:
        """[tokens of a row, 1, 1, width] to [1, tokens of a row, 1, width]."""
        weights, chosen = self.route(x)
        sent, metadata = ttnn.all_to_all_dispatch(x, chosen, self.owners, cluster_axis=0)
        made = self.work(sent, metadata)
        combined = ttnn.all_to_all_combine(made, metadata, self.owners, cluster_axis=0, output_tensor=self.slots)
        return self.add_up(combined, weights)

    def route(self, x: Any) -> tuple[Any, Any]:
        """The experts that tokens choose, and their weights: [tokens, 1, 1, chosen] each."""
        flat = ttnn.to_layout(ttnn.reshape(x, (1, 1, x.shape[0], x.shape[3])), ttnn.TILE_LAYOUT)
        shares = ttnn.softmax(ttnn.linear(flat, self.router), dim=-1)
        weights, chosen = ttnn.topk(shares, k=self.config.chosen, dim=-1)
        weights = ttnn.divide(weights, ttnn.sum(weights, dim=3, keepdim=True))
        shape = (x.shape[0], 1, 1, self.config.chosen)
        rows = (ttnn.to_layout(each, ttnn.ROW_MAJOR_LAYOUT) for each in (weights, chosen))
        weights, chosen = (ttnn.reshape(each, shape) for each in rows)
        return weights, chosen

    def work(self, sent: Any, metadata: Any) -> Any:
        """What the experts of a device make of the tokens that it was sent: [experts, tokens, 1, width].

        Tokens are taken in runs of a tile. An expert works on a run if one of its tokens chose it.
        """
        count, width = sent.shape[1], sent.shape[3]
        runs = count // TILE
        remapped = ttnn.moe_expert_token_remap(self.everyone, self.owners, metadata, reduction_size=TILE)
        chosen = remapped[1]  # [1, 1, runs, e]
        own = chosen.shape[3]
        x = ttnn.to_layout(ttnn.reshape(sent, (1, runs, TILE, width)), ttnn.TILE_LAYOUT)
        first = ttnn.reshape(chosen, (1, runs, 1, own))
        gate, up = (
            ttnn.sparse_matmul(x, each, sparsity=first, program_config=self.program(self.config.hidden))
            for each in (self.gate, self.up)
        )  # [1, runs, 1, e, 32, hidden]
        gated = ttnn.multiply(ttnn.silu(gate), up)
        gated = ttnn.reshape(gated, (runs, own, TILE, self.config.hidden))
        made = ttnn.sparse_matmul(
            gated, self.down, sparsity=chosen, is_input_a_sparse=True, program_config=self.program(width)
        )  # [runs, e, 32, width]
        made = ttnn.to_layout(ttnn.permute(made, (1, 0, 2, 3)), ttnn.ROW_MAJOR_LAYOUT)
        return ttnn.reshape(made, (own, count, 1, width))

    def program(self, width: int) -> Any:
        """One row of tiles on as many cores as the width has tiles."""
        ones = "in0_block_w out_subblock_h out_subblock_w out_block_h out_block_w per_core_M per_core_N"
        return ttnn.MatmulMultiCoreReuseMultiCast1DProgramConfig(
            compute_with_storage_grid_size=ttnn.CoreCoord(width // TILE, 1),
            **dict.fromkeys(ones.split(), 1),
            fuse_batch=False,
            fused_activation=None,
            mcast_in0=True,
        )

    def add_up(self, slots: Any, weights: Any) -> Any:
        """The weighted sum over slots, [1, tokens, 1, width], and over columns: each had some of the experts."""
        slots = ttnn.to_layout(slots, ttnn.TILE_LAYOUT)
        weights = ttnn.to_layout(ttnn.permute(weights, (3, 0, 2, 1)), ttnn.TILE_LAYOUT)  # [chosen, tokens, 1, 1]
        mine = ttnn.sum(ttnn.multiply(slots, weights), dim=0, keepdim=True)
        scattered = ttnn.reduce_scatter(mine, dim=3, cluster_axis=1)
        return ttnn.all_gather(scattered, dim=3, cluster_axis=1)


def main() -> None:
    """Run a block on a mesh and compare it with torch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2x4", help="rows x columns of the mesh (default 2x4)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens, 32 or a multiple for each row (default 64)")
    parser.add_argument("--experts", type=int, default=64, help="experts of all devices (default 64)")
    parser.add_argument("--chosen", type=int, default=4, help="experts of each token (default 4)")
    options = parser.parse_args()
    block = Block(Config(experts=options.experts, chosen=options.chosen))
    tokens = block.draw_tokens(options.tokens)
    ttnn.set_fabric_config(ttnn.FabricConfig.FABRIC_1D)
    try:
        with ttnn.create_mesh_device(ttnn.MeshShape(*map(int, options.mesh.split("x")))) as mesh:
            found = Experts(block, mesh, options.tokens // mesh.shape[0])(tokens)
            each = options.experts // mesh.get_num_devices()
            print(f"{mesh}, {each} experts on each device")
            both = torch.stack([found.float().flatten(), block.reference(tokens).flatten()])
            print(f"{len(tokens)} tokens, PCC {torch.corrcoef(both)[0, 1]:.6f}")
    finally:
        ttnn.set_fabric_config(ttnn.FabricConfig.DISABLED)


if __name__ == "__main__":
    main()
