"""The oracle of ops over a launched cluster: the same call on dense tensors of this process, values and gradients."""

from __future__ import annotations

from typing import Any

import torch

import meshloom as loom
from meshloom import Mesh, Topology
from meshloom.engines.layout import short_name
from oracle import MESHES, check_close, check_gradients, check_placements, draw_placements, draw_request, draw_values
from samples import SAMPLES, Draw, Operand, Seeded

SHAPES = [shape for shape in MESHES if len(shape) < 3]


class Made:
    """An operand made twice: dense here, and on the workers."""

    def __init__(self, d: Draw, mesh: Mesh, operand: Operand, gradients: bool) -> None:
        placements = draw_placements(d, mesh, operand.shape, operand.dtype, partial=operand.values == "any")
        self.differentiable = gradients and operand.gradient and operand.dtype.is_floating_point
        self.topology = Topology(mesh, placements, operand.shape, short_name(operand.dtype))
        self.dense = draw_values(operand, d.number(0, 10_000)).requires_grad_(self.differentiable)
        self.leaf = loom.distribute(self.dense.detach(), mesh, self.topology.reduced.placements)
        if self.differentiable:
            self.leaf.requires_grad_()
        self.tensor = self.leaf.redistribute(placements)


def check_remote_case(cluster: Any, name: str, number: int) -> None:
    """One case of an op: mesh, placements and values all follow from its name and number."""
    d = Seeded(f"{name} {number}")
    mesh = cluster.open_mesh(d.pick(SHAPES))
    case = SAMPLES[name](d)
    made = [Made(d, mesh, operand, case.gradients) for operand in case.operands]
    dense = _listed(case.run(*(each.dense for each in made)))
    request = draw_request(d, made, dense)
    what = f"{name} {number}: {[str(each.tensor.topology) for each in made]} asked {request}"
    if request is None:
        case.run(*(each.tensor for each in made))  # the second call is one that was seen before
        ours = _listed(case.run(*(each.tensor for each in made)))
    else:
        with loom.with_output(request):
            ours = _listed(case.run(*(each.tensor for each in made)))
    assert len(ours) == len(dense), what
    for mine, theirs in zip(ours, dense, strict=True):
        assert isinstance(mine, loom.Tensor), what
        assert tuple(mine.shape) == tuple(theirs.shape), what
        check_close(mine.detach().to_torch(), theirs.detach(), what)
        check_placements(mine, request, what)
    check_gradients(d, made, ours, dense, what, is_here=False)


def _listed(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def llama_losses(mesh: Mesh, plan: str) -> list[float]:
    """Three steps of a small public Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=32,
    )  # fmt: skip
    model = loom.parallelize(LlamaForCausalLM(sizes), mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def llama_losses_of_rank() -> list[float]:
    """The same on the mesh of a run, the second time."""
    mesh = loom.open_mesh((2, 2), axes=("dp", "tp"))
    return [llama_losses(mesh, "fsdp") for _ in range(2)][1]
