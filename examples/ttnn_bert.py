"""A BERT in TTNN's spelling that marks answers: its weights come from the torch model, its batch is cut over a mesh.

    python examples/ttnn_bert.py
    python examples/ttnn_bert.py --mesh 1x1 --length 128

`preprocess_model_parameters` turns the modules of a torch model into tensors of the same names: weights of linear
layers transposed, in tiles, on every device. A preprocessor of our own makes one weight of those for queries, keys and
values. Each device reads its part of the batch and needs no other: there is no collective. Starts and ends of answers
are compared with the torch model in float32.
"""

from __future__ import annotations

import argparse
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshloom import ttnn
from meshloom.ttnn.model_preprocessing import (
    preprocess_linear_bias,
    preprocess_linear_weight,
    preprocess_model_parameters,
)

EPSILON = 1e-12
L1 = ttnn.L1_MEMORY_CONFIG


SIZES = {"width": 256, "heads": 8, "hidden": 1024, "layers": 3, "vocabulary": 1024, "longest": 128}


class Config(namedtuple("Config", SIZES, defaults=SIZES.values())):
    """The sizes of a model."""

    @property
    def head(self) -> int:
        """The width of a head."""
        return self.width // self.heads


# the model in torch


class Embeddings(nn.Module):
    """Words, their places and the part of the text that they belong to."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.position_embeddings = nn.Embedding(config.longest, config.width)
        self.token_type_embeddings = nn.Embedding(2, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=EPSILON)

    def forward(self, ids: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        """[batch, length] to [batch, length, width]."""
        places = self.position_embeddings(torch.arange(ids.shape[1]))
        return self.LayerNorm(self.word_embeddings(ids) + places + self.token_type_embeddings(types))


class SelfAttention(nn.Module):
    """Every word looks at all words that the mask shows."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(config.width, config.width) for _ in range(3))
        self.heads = config.heads

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[batch, length, width], with a mask that is added to the scores."""
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """Attention and two linear layers, each with a residual and a norm after it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention, self.dense = SelfAttention(config), nn.Linear(config.width, config.width)
        self.up, self.down = nn.Linear(config.width, config.hidden), nn.Linear(config.hidden, config.width)
        self.attention_norm, self.norm = (nn.LayerNorm(config.width, eps=EPSILON) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[batch, length, width]."""
        x = self.attention_norm(x + self.dense(self.attention(x, mask)))
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """Scores of where an answer starts and where it ends."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.answers = nn.Linear(config.width, 2)

    def forward(self, ids: torch.Tensor, types: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[batch, length] to [batch, length, 2]."""
        x = self.embeddings(ids, types)
        for layer in self.layers:
            x = layer(x, mask)
        return self.answers(x)


def make_model(config: Config) -> Bert:
    """The model with random weights that keep the size of their inputs, norms included."""
    torch.manual_seed(0)
    model = Bert(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name.lower():
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif parameter.dim() == 2 and "embeddings" not in name:
            parameter.data = torch.randn_like(parameter) / parameter.shape[1] ** 0.5
    return model


@dataclass(frozen=True)
class Batch:
    """Texts of several lengths: words, the part that each belongs to, and a mask that hides what is behind the end."""

    ids: torch.Tensor
    types: torch.Tensor
    mask: torch.Tensor  # [batch, 1, 1, length], added to scores


def draw_batch(config: Config, count: int, length: int) -> Batch:
    """Random texts."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocabulary, (count, length), generator=draw)
    ends = torch.randint(length // 2, length + 1, (count, 1), generator=draw)
    places = torch.arange(length)
    mask = torch.zeros(count, length).masked_fill(places >= ends, -1e9)
    return Batch(ids, (places >= ends // 3).long(), mask[:, None, None])


# the same on a mesh


def custom_preprocessor(model: nn.Module, name: str) -> dict[str, Any]:
    """One weight for queries, keys and values; everything else as always."""
    if not isinstance(model, SelfAttention):
        return {}
    three = (model.query, model.key, model.value)
    weight, bias = torch.cat([each.weight for each in three]), torch.cat([each.bias for each in three])
    return {
        "query_key_value": {
            "weight": preprocess_linear_weight(weight, dtype=ttnn.bfloat16),
            "bias": preprocess_linear_bias(bias, dtype=ttnn.bfloat16),
        }
    }


def load_parameters(model: Bert, mesh: Any) -> Any:
    """The weights of a torch model on every device of a mesh."""
    with ttnn.distribute(ttnn.ReplicateTensorToMesh(mesh)):
        return preprocess_model_parameters(
            initialize_model=lambda: model, custom_preprocessor=custom_preprocessor, device=mesh
        )


def linear(x: Any, parameters: Any, **options: Any) -> Any:
    """x @ weight + bias."""
    return ttnn.linear(x, parameters.weight, bias=parameters.bias, memory_config=L1, **options)


def normalise(x: Any, residual: Any, parameters: Any) -> Any:
    """The norm of a sum, of which nothing else is needed."""
    affine = {"weight": parameters.weight, "bias": parameters.bias}
    found = ttnn.layer_norm(x, residual_input_tensor=residual, **affine, epsilon=EPSILON, memory_config=L1)
    ttnn.deallocate(x)
    ttnn.deallocate(residual)
    return found


def attend(x: Any, mask: Any, parameters: Any, heads: int) -> Any:
    """Attention in its single steps, the softmax in place."""
    fused = linear(x, parameters.query_key_value)
    q, k, v = ttnn.transformer.split_query_key_value_and_split_heads(fused, memory_config=L1, num_heads=heads)
    ttnn.deallocate(fused)
    scores = ttnn.matmul(q, k, memory_config=L1)  # keys are transposed already
    shares = ttnn.transformer.attention_softmax_(scores, attention_mask=mask, head_size=q.shape[-1])
    ttnn.deallocate(q)
    ttnn.deallocate(k)
    mixed = ttnn.matmul(shares, v, memory_config=L1)
    ttnn.deallocate(shares)
    ttnn.deallocate(v)
    return ttnn.transformer.concatenate_heads(mixed, memory_config=L1)


def bert(ids: Any, types: Any, places: Any, mask: Any, parameters: Any, config: Config) -> Any:
    """[batch, length] to [batch, length, 2] on every device."""
    tables = parameters.embeddings
    x = ttnn.embedding(ids, tables.word_embeddings.weight, layout=ttnn.TILE_LAYOUT)
    x = ttnn.add(x, ttnn.embedding(types, tables.token_type_embeddings.weight, layout=ttnn.TILE_LAYOUT))
    at = ttnn.embedding(places, tables.position_embeddings.weight, layout=ttnn.TILE_LAYOUT)
    x = normalise(x, at, tables.LayerNorm)
    for layer in parameters.layers:
        x = normalise(linear(attend(x, mask, layer.attention, config.heads), layer.dense), x, layer.attention_norm)
        x = normalise(linear(linear(x, layer.up, activation="gelu"), layer.down), x, layer.norm)
    return linear(x, parameters.answers)


def run(model: Bert, config: Config, batch: Batch, mesh: Any) -> torch.Tensor:
    """What a mesh makes of a batch, [batch, length, 2]."""
    parameters, cut = load_parameters(model, mesh), ttnn.ShardTensorToMesh(mesh, dim=0)
    places = torch.arange(batch.ids.shape[1]).expand_as(batch.ids)
    words = [
        ttnn.from_torch(each, dtype=ttnn.uint32, device=mesh, mesh_mapper=cut)
        for each in (batch.ids, batch.types, places)
    ]
    mask = ttnn.from_torch(
        batch.mask, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=mesh, memory_config=L1, mesh_mapper=cut
    )
    scores = bert(*words, mask, parameters, config)
    return ttnn.to_torch(scores, mesh_composer=ttnn.ConcatMeshToTensor(mesh, dim=0)).float()


def correlation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's coefficient."""
    return float(torch.corrcoef(torch.stack([found.float().flatten(), expected.float().flatten()]))[0, 1])


def main() -> None:
    """Run a batch on a mesh and compare it with torch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="1x2", help="rows x columns of the mesh (default 1x2)")
    parser.add_argument("--batch", type=int, default=4, help="texts for each device (default 4)")
    parser.add_argument("--length", type=int, default=64, help="words of a text, a multiple of 32 (default 64)")
    options = parser.parse_args()
    if options.length % 32:
        parser.error(f"--length {options.length} is no multiple of 32")
    config = Config(longest=max(options.length, SIZES["longest"]))
    model = make_model(config)
    with ttnn.create_mesh_device(ttnn.MeshShape(*map(int, options.mesh.split("x")))) as mesh:
        batch = draw_batch(config, options.batch * mesh.get_num_devices(), options.length)
        found = run(model, config, batch, mesh)
        with torch.no_grad():
            expected = model(batch.ids, batch.types, batch.mask)
        print(mesh)
        for name, column in (("starts", 0), ("ends", 1)):
            ours, theirs = found[..., column], expected[..., column]
            same = int((ours.argmax(1) == theirs.argmax(1)).sum())
            print(f"{name:<6} PCC {correlation(ours, theirs):.6f}, {same} of {len(ours)} are torch's")


if __name__ == "__main__":
    main()
