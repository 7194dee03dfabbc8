"""What the layers of a model are for, found by kind, name and shape: columns, rows, vocabularies, experts, blocks.

A *column* layer reads the block's input and splits what comes out (queries, gates, the wide side of a feed-forward); a
*row* layer writes the block's output and splits what goes in. Kinds decide which dim that is: `nn.Linear` keeps (out,
in), `Conv1D` of transformers (in, out), `nn.MultiheadAttention` has its weights itself. Which layer is which is read
from the table of names below; layers with other names are told by shape, where that leaves no doubt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshloom.nn.patterns import fits

# The last parts of module names, by role. `dense` and `proj` mean different things in different places.
COLUMNS = (
    "{q,k,v,gate,up,qkv,gate_up,in,query,key,value,dt}_proj {q,kv}_b_proj {q,k,v,query,key,value,qkv,query_key_value} "
    "{fc1,lin1,linear1,w1,w3,wi,wi_0,wi_1,c_attn,q_attn,c_fc,fc_in,up,gate,Wqkv,Wi} to_{q,k,v,qkv} "
    "add_{q,k,v}_proj dense_h_to_4h intermediate.dense net.0.proj"
).split()
ROWS = (
    "{o,out,down,x}_proj {fc2,lin2,linear2,w2,wo,Wo,c_proj,fc_out,o,out,down} to_out to_out.0 to_add_out dense_4h_to_h "
    "{output,attention,self_attention}.dense attn.proj net.2"
).split()
VOCABULARIES = (
    "{embed_tokens,wte,word_embeddings,embedding,embeddings,tok_embeddings,token_embedding,embed_in,shared}".split()
)


@dataclass(frozen=True)
class Role:
    """A parameter of a layer: what its layer is (`column`, `row`, `vocabulary`, `expert`), and the dim to shard."""

    layer: str
    kind: str
    dim: int
    other: int | None = None  # the other dim of a matrix


def roles_of(module: nn.Module) -> dict[str, Role]:
    """The parameters that tensor parallelism shards, by name; the others stay replicated.

    >>> roles_of(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4)))["0.bias"]
    Role(layer='0', kind='column', dim=0, other=None)
    """
    found: dict[str, Role] = {}
    kinds = _kinds_of_layers(module)
    for name, layer in module.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            found.update(_attention(name, layer))
        elif name in kinds:
            found.update(_layer(name, layer, kinds[name]))
        elif "expert" in type(layer).__name__.lower() or name.rpartition(".")[2] == "experts":
            found.update(_experts(name, layer))
    return found


def _kinds_of_layers(module: nn.Module) -> dict[str, str]:
    layers = {name: layer for name, layer in module.named_modules() if _is_product(layer)}
    kinds = {name: kind for name in layers if (kind := _kind_by_name(name))}
    kinds |= {name: kind for name, kind in _kinds_by_shape(module, layers) if name not in kinds}
    tables = dict(_vocabularies(module))
    shapes = {(table.num_embeddings, table.embedding_dim) for table in tables.values()}
    blocks = tuple(f"{block}." for block in _blocks(module))  # a layer inside of a block is not the head
    heads = [name for name, layer in layers.items() if _sizes(layer) in shapes and not name.startswith(blocks)]
    return kinds | dict.fromkeys((*heads, *tables), "vocabulary")


def _is_product(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or _is_transposed(layer)


def _is_transposed(layer: nn.Module) -> bool:
    """Whether it is a `Conv1D` of transformers, which keeps (in, out)."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") and hasattr(layer, "nx")


def _sizes(layer: Any) -> tuple[int, int]:
    """What comes out and what goes in."""
    return (layer.nf, layer.nx) if _is_transposed(layer) else (layer.out_features, layer.in_features)


def _kind_by_name(name: str) -> str | None:
    parts = [part for part in name.split(".") if part != "base_layer"]  # PEFT wraps layers
    tails = [".".join(parts[-count:]) for count in (3, 2, 1) if count <= len(parts)]
    for tail in tails:
        for kind, patterns in (("column", COLUMNS), ("row", ROWS)):
            if any(fits(pattern, tail) for pattern in patterns):
                return kind
    return None


def _kinds_by_shape(module: nn.Module, layers: dict[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Two products in turn: what comes out of the first goes into the second."""
    for prefix, parent in module.named_modules():
        if isinstance(parent, nn.Sequential):
            names = [f"{prefix}.{each}".lstrip(".") for each, _ in parent.named_children()]
            inside = [name for name in names if name in layers]
            while len(inside) >= 2:
                first, second, *inside = inside
                if _sizes(layers[first])[0] == _sizes(layers[second])[1]:
                    yield from ((first, "column"), (second, "row"))
                else:
                    inside = [second, *inside]


def _vocabularies(module: nn.Module) -> Iterator[tuple[str, nn.Embedding]]:
    tied = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Linear)}
    asked = getattr(module, "get_input_embeddings", None)
    try:
        known = asked() if callable(asked) else None
    except (NotImplementedError, AttributeError):  # transformers' answer where a model has none
        known = None
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding):
            named = any(fits(pattern, name.rpartition(".")[2]) for pattern in VOCABULARIES)
            if named or layer is known or id(layer.weight) in tied:
                yield name, layer


def _layer(name: str, layer: Any, kind: str) -> Iterator[tuple[str, Role]]:
    into = 0 if _is_transposed(layer) else 1
    dim = into if kind == "row" else 0 if isinstance(layer, nn.Embedding) else 1 - into
    for each, parameter in layer.named_parameters(recurse=False):
        if parameter.dim() == 2:
            yield f"{name}.{each}", Role(name, kind, dim, 1 - dim)
        elif parameter.dim() == 1 and kind != "row":
            yield f"{name}.{each}", Role(name, kind, 0)


def _attention(name: str, layer: nn.MultiheadAttention) -> Iterator[tuple[str, Role]]:
    for each, parameter in layer.named_parameters(recurse=False):
        if each.startswith("in_proj") or each.endswith("_proj_weight"):
            yield f"{name}.{each}".lstrip("."), Role(name, "column", 0, 1 if parameter.dim() == 2 else None)
    yield f"{name}.out_proj.weight".lstrip("."), Role(name, "row", 1, 0)


def _experts(name: str, layer: nn.Module) -> Iterator[tuple[str, Role]]:
    """Weights of all experts in one parameter, the experts first."""
    own = dict(layer.named_parameters(recurse=False))
    counts = {each.shape[0] for each in own.values() if each.dim() == 3}
    for each, parameter in own.items():
        if parameter.dim() >= 2 and parameter.shape[0] in counts:
            yield f"{name}.{each}", Role(name, "expert", 0, parameter.dim() - 1)


def blocks_of(module: nn.Module) -> tuple[str, ...]:
    """The lists whose modules are the blocks of a model: the outermost ones with modules that have parts themselves.

    >>> blocks_of(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 3, enable_nested_tensor=False))
    ('layers',)
    """
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in _blocks(module)))


def _blocks(module: nn.Module) -> list[str]:
    found: list[str] = []
    for name, parent in module.named_modules():
        if isinstance(parent, (nn.ModuleList, nn.Sequential)) and not any(name.startswith(f"{b}.") for b in found):
            children = dict(parent.named_children())
            if name and children and all(_has_parts(child) for child in children.values()):
                found += [f"{name}.{each}" for each in children]
    return found


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())
