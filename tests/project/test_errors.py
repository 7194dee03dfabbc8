"""Messages as whole texts: what happened with the values, where, and what to do; nothing changes before the checks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom import Mesh, Partial, Shard, errors

MESH = Mesh(dp=2, tp=4)
PAIR = Mesh(d=2)


def x() -> loom.Tensor:
    return loom.ones(16, 8, mesh=MESH, placements={"dp": Shard(0)})


def w() -> loom.Tensor:
    return loom.ones(8, 12, mesh=MESH, placements={"tp": Shard(1)})


def partial() -> loom.Tensor:
    return loom.ones(4, 4, mesh=MESH, placements={"tp": Partial("sum")})


def number() -> loom.Tensor:
    return loom.ones((), mesh=MESH, placements={"tp": Partial("sum")})


def without_data(*shape: int) -> loom.Tensor:
    return loom.ones(*shape, mesh=MESH, device="meta")


def parts(*sizes: int) -> list[torch.Tensor]:
    return [torch.ones(size) for size in sizes]


def set_item(index: Any, value: Any) -> None:
    x()[index] = value


def view_write() -> None:
    loom.ones(48, mesh=MESH, placements="R, R").expand(2, 48).add_(1)


def no_grad_of_many() -> None:
    x().requires_grad_().mul(2).backward()


Case = tuple[type, Callable[[], Any], str]

CASES: dict[str, Case] = {
    "wrong dim of a reduction": (
        loom.ShapeError,
        lambda: x().sum(5),
        """dim 5 is out of range for a tensor of 2 dims
  call  sum(f32[16, 8](S(0), R))
  mesh  Mesh(dp=2, tp=4)
  fix   dims go from -2 to 1""",
    ),
    "wrong dim of a transpose": (
        loom.ShapeError,
        lambda: x().transpose(0, -3),
        """dim1 -3 is out of range for a tensor of 2 dims
  call  transpose(f32[16, 8](S(0), R))
  mesh  Mesh(dp=2, tp=4)
  fix   dims go from -2 to 1""",
    ),
    "wrong dim of a placement": (
        loom.PlacementError,
        lambda: loom.ones(4, 4, mesh=MESH, placements="S(2), R"),
        """dim 2 is out of range for a tensor of 2 dims
  mesh   Mesh(dp=2, tp=4)
  asked  (S(2), R)
  fix    dims go from 0 to 1""",
    ),
    "a dim that a vector does not have": (
        loom.PlacementError,
        lambda: loom.ones(4, mesh=MESH, placements="S(1), R"),
        """dim 1 is out of range for a tensor of 1 dims
  mesh   Mesh(dp=2, tp=4)
  asked  (S(1), R)
  fix    its only dim is 0: use S(0)""",
    ),
    "a sharded number": (
        loom.PlacementError,
        lambda: loom.ones((), mesh=MESH, placements="S(0), R"),
        """dim 0 is out of range for a tensor of 0 dims
  mesh   Mesh(dp=2, tp=4)
  asked  (S(0), R)
  fix    a 0-d tensor can only be R or P""",
    ),
    "wrong dim of a requested output": (
        loom.PlacementError,
        lambda: loom.matmul(x(), w(), output="S(4), R"),
        """dim 4 is out of range for a tensor of 2 dims
  call   matmul(f32[16, 8](S(0), R), f32[8, 12](R, S(1)))
  mesh   Mesh(dp=2, tp=4)
  asked  (S(4), R)
  fix    dims go from 0 to 1""",
    ),
    "wrong axis name": (
        loom.MeshError,
        lambda: loom.ones(4, 4, mesh=MESH, placements={"tq": Shard(0)}),
        """the mesh has no axis 'tq'
  mesh  Mesh(dp=2, tp=4)
  fix   did you mean 'tp'? known: 'dp', 'tp'""",
    ),
    "wrong axis name of a redistribution": (
        loom.MeshError,
        lambda: x().redistribute({"zz": Shard(0)}),
        """the mesh has no axis 'zz'
  mesh  Mesh(dp=2, tp=4)
  fix   known: 'dp', 'tp'""",
    ),
    "bad placement text": (
        loom.NotationError,
        lambda: loom.ones(4, 4, mesh=MESH, placements="S(0), X"),
        """'X' is not a placement
  text  'S(0), X'
  fix   write S(dim), R or P(sum), separated by commas, as in 'S(0), R'""",
    ),
    "unknown reduction": (
        loom.PlacementError,
        lambda: Partial("sam"),
        """Partial has no reduction 'sam'
  fix  did you mean 'sum'? known: 'sum', 'mean', 'max', 'min', 'prod'""",
    ),
    "too few placements": (
        loom.PlacementError,
        lambda: loom.ones(4, 4, mesh=MESH, placements="S(0)"),
        """1 placements for 2 mesh axes
  mesh   Mesh(dp=2, tp=4)
  asked  (S(0))
  fix    give one per axis, or name the axes: {'dp': Shard(0)}""",
    ),
    "a number as placements": (
        loom.PlacementError,
        lambda: loom.ones(4, 4, mesh=MESH, placements=0),
        """0 is not a placement
  fix  use Shard(dim), Replicate() or Partial(op)""",
    ),
    "text that is no mesh": (
        loom.NotationError,
        lambda: loom.parse("Mesh(dp=2, tp)"),
        """'Mesh(dp=2, tp)' is not a mesh
  fix  write it as Mesh(dp=2, tp=4)""",
    ),
    "empty axis": (
        loom.MeshError,
        lambda: loom.open_mesh((2, 0), axes=("a", "b")),
        """axis 'b' has size 0
  asked  a=2, b=0
  fix    every axis has a whole number of devices, 1 or more""",
    ),
    "negative axis": (
        loom.MeshError,
        lambda: Mesh(dp=-1),
        """axis 'dp' has size -1
  asked  dp=-1
  fix    every axis has a whole number of devices, 1 or more""",
    ),
    "fractional axis": (
        loom.MeshError,
        lambda: loom.open_mesh((2.0,)),  # type: ignore[arg-type]
        """axis 'x0' has size 2.0
  asked  x0=2.0
  fix    every axis has a whole number of devices, 1 or more""",
    ),
    "too few axis names": (
        loom.MeshError,
        lambda: loom.open_mesh((2, 2), axes=("a",)),
        """2 sizes and 1 axis names do not pair up
  shape  (2, 2)
  axes   ('a',)
  fix    give one name per size""",
    ),
    "an axis name twice": (
        loom.MeshError,
        lambda: loom.open_mesh((2, 2), axes=("a", "a")),
        """two axes have the same name
  asked  a=2, a=2
  fix    name every axis differently""",
    ),
    "no axis name": (
        loom.MeshError,
        lambda: loom.open_mesh((2,), axes=("1a",)),
        """'1a' is not an axis name
  asked  1a=2
  fix    use an identifier such as 'tp'""",
    ),
    "too few device ids": (
        loom.MeshError,
        lambda: loom.open_mesh((2,), device_ids=(1,)),
        """a mesh of shape (2,) needs 2 device ids and got 1
  ids  (1,)
  fix  give one id per device""",
    ),
    "a device id twice": (
        loom.MeshError,
        lambda: loom.open_mesh((2,), device_ids=(1, 1)),
        """a device id stands twice
  ids  (1, 1)
  fix  name every device once""",
    ),
    "a physical shape that does not divide": (
        loom.MeshError,
        lambda: loom.open_mesh((4, 4), physical=(3, 2)),
        """a virtual mesh of shape (4, 4) does not lie evenly on physical devices of shape (3, 2)
  fix  use a physical shape that divides it axis by axis, such as (1, 2)""",
    ),
    "a mesh reshaped to another size": (
        loom.MeshError,
        lambda: MESH.reshape(x=5),
        """8 devices cannot be reshaped to 5
  mesh   Mesh(dp=2, tp=4)
  asked  x=5
  fix    use sizes whose product is 8""",
    ),
    "a submesh that is not there": (
        loom.MeshError,
        lambda: MESH.submesh(dp=2),
        """place 2 is out of range for axis 'dp' of size 2
  mesh  Mesh(dp=2, tp=4)
  fix   places go from -2 to 1""",
    ),
    "a coordinate that is not there": (
        loom.MeshError,
        lambda: x().shard_at((2, 0)),
        """coordinate (2, 0) is not on the mesh
  mesh  Mesh(dp=2, tp=4)
  fix   coordinates go from (0, 0) to (1, 3)""",
    ),
    "mixed meshes": (
        loom.MeshError,
        lambda: x() + loom.ones(16, 8, mesh=Mesh(all=8)),
        """the operands are on different meshes
  call    add(f32[16, 8](S(0), R), f32[16, 8](S(0)))
  mesh    Mesh(dp=2, tp=4)
  meshes  Mesh(dp=2, tp=4) and Mesh(all=8)
  fix     bring them to one mesh: x.redistribute(placements, mesh=mesh)""",
    ),
    "shapes that do not add": (
        loom.ShapeError,
        lambda: x() + w(),
        """sizes 8 and 16 do not broadcast at dim -2
  call    add(f32[16, 8](S(0), R), f32[8, 12](R, S(1)))
  mesh    Mesh(dp=2, tp=4)
  shapes  [16, 8] and [8, 12]
  fix     make them equal, or one of them 1""",
    ),
    "shapes that do not multiply": (
        loom.ShapeError,
        lambda: x() @ x(),
        """label 'k' has size 8 and size 16
  call    matmul(f32[16, 8](S(0), R), f32[16, 8](S(0), R))
  mesh    Mesh(dp=2, tp=4)
  shapes  [16, 8] and [16, 8]
  fix     make the dims called 'k' equal""",
    ),
    "shapes that do not concatenate": (
        loom.ShapeError,
        lambda: loom.cat([x(), w()]),
        """cat along dim 0 needs equal sizes elsewhere
  call    cat(f32[16, 8](S(0), R), f32[8, 12](R, S(1)))
  mesh    Mesh(dp=2, tp=4)
  shapes  [16, 8] and [8, 12]
  fix     make them equal in every dim but 0""",
    ),
    "a reshape to another size": (
        loom.ShapeError,
        lambda: x().reshape(5, 5),
        """128 elements do not fill shape [5, 5]
  call  reshape(f32[16, 8](S(0), R))
  mesh  Mesh(dp=2, tp=4)
  fix   use a shape with as many elements""",
    ),
    "einsum labels that disagree": (
        loom.ShapeError,
        lambda: loom.einsum("ij,kj->ik", x(), w()),
        """label 'j' has size 8 and size 12
  call    einsum(f32[16, 8](S(0), R), f32[8, 12](R, S(1)))
  mesh    Mesh(dp=2, tp=4)
  labels  ij, kj
  fix     make the dims called 'j' equal""",
    ),
    "a plain tensor of the wrong shape": (
        loom.ShapeError,
        lambda: x() + torch.ones(3),
        """sizes 3 and 8 do not broadcast at dim -1
  call    add(f32[16, 8](S(0), R), f32[3](R, R))
  mesh    Mesh(dp=2, tp=4)
  shapes  [16, 8] and [3]
  fix     make them equal, or one of them 1""",
    ),
    "a plain weight of the wrong shape": (
        loom.ShapeError,
        lambda: F.linear(x(), torch.ones(3, 7)),
        """label 'k' has size 8 and size 7
  call    linear(f32[16, 8](S(0), R), f32[3, 7](R, R))
  mesh    Mesh(dp=2, tp=4)
  shapes  [16, 8] and [3, 7]
  fix     make the dims called 'k' equal""",
    ),
    "a partial leaf": (
        loom.GradientError,
        lambda: partial().requires_grad_(),
        """a tensor that is P(sum) on axis 'tp' cannot require a gradient
  tensor  f32[4, 4](R, P(sum)) on Mesh(dp=2, tp=4)
  fix     redistribute it first: x.redistribute({'tp': Replicate()}).requires_grad_()""",
    ),
    "a partial parameter": (
        loom.GradientError,
        lambda: loom.Parameter(partial()),
        """a tensor that is P(sum) on axis 'tp' cannot require a gradient
  tensor  f32[4, 4](R, P(sum)) on Mesh(dp=2, tp=4)
  fix     redistribute it first: x.redistribute({'tp': Replicate()}).requires_grad_()""",
    ),
    "a gradient of integers": (
        loom.GradientError,
        lambda: loom.arange(4, mesh=MESH).requires_grad_(),
        """a tensor of i64 has no gradient
  fix  cast it: x.float()""",
    ),
    "backward from many numbers": (
        loom.GradientError,
        no_grad_of_many,
        """backward starts from one number and this tensor has more
  tensor  f32[16, 8](S(0), R) on Mesh(dp=2, tp=4)
  fix     reduce it first, as in y.sum().backward(), or give backward(gradient=...)""",
    ),
    "an unknown level of communication": (
        loom.ArgumentError,
        lambda: loom.communication("forbit").__enter__(),
        """communication level 'forbit' is not known
  fix  did you mean 'forbid'? known: 'allow', 'warn', 'forbid'""",
    ),
    "item of many": (
        loom.ArgumentError,
        lambda: x().item(),
        """item() takes a tensor of one element, not 128
  tensor  f32[16, 8](S(0), R) on Mesh(dp=2, tp=4)
  fix     use x.tolist() or x.to_torch()""",
    ),
    "bool of many": (
        loom.ArgumentError,
        lambda: bool(x() > 0),
        """the truth of a tensor of 128 elements is ambiguous
  tensor  bool[16, 8](S(0), R) on Mesh(dp=2, tp=4)
  fix     use x.any() or x.all()""",
    ),
    "distribute of a distributed tensor": (
        loom.ArgumentError,
        lambda: loom.distribute(x(), MESH),
        """distribute takes a dense tensor and got one on a mesh
  tensor  f32[16, 8](S(0), R) on Mesh(dp=2, tp=4)
  fix     x.redistribute(placements) moves it on its mesh; x.to_torch() makes it dense""",
    ),
    "an index that is not there": (
        loom.BoundsError,
        lambda: x()[20],
        """index 20 is out of range for dim 0 of size 16
  call  getitem(f32[16, 8](S(0), R))
  mesh  Mesh(dp=2, tp=4)
  fix   indices go from -16 to 15""",
    ),
    "too many indices": (
        loom.BoundsError,
        lambda: x()[0, 0, 0],
        """3 indices for 2 dims
  call  getitem(f32[16, 8](S(0), R))
  mesh  Mesh(dp=2, tp=4)
  fix   give at most 2; None adds a dim""",
    ),
    "a negative step": (
        loom.ArgumentError,
        lambda: x()[::-1],
        """a slice step must be above 0, not -1
  call  getitem(f32[16, 8](S(0), R))
  mesh  Mesh(dp=2, tp=4)
  fix   flip the tensor instead""",
    ),
    "writing to an index that is not there": (
        loom.BoundsError,
        lambda: set_item(20, 1.0),
        """index 20 is out of range for dim 0 of size 16
  fix  indices go from -16 to 15""",
    ),
    "reading without data": (
        loom.UnsupportedError,
        lambda: without_data(4).sum().item(),
        """item() needs values and this tensor has none
  tensor  f32[](R, R) on Mesh(dp=2, tp=4)
  fix     explain and meta tensors know shapes only: keep value-dependent code outside""",
    ),
    "truth without data": (
        loom.UnsupportedError,
        lambda: bool(without_data(1)),
        """bool() needs values and this tensor has none
  tensor  f32[1](S(0), S(0)) on Mesh(dp=2, tp=4)
  fix     explain and meta tensors know shapes only: keep value-dependent code outside""",
    ),
    "a dtype that is none": (
        loom.NotationError,
        lambda: loom.zeros(4, mesh=MESH, dtype="flaot32"),
        """'flaot32' is not a dtype
  fix  did you mean 'float32'? known: 'float32', 'float64', 'float16'""",
    ),
    "numpy without data": (
        loom.UnsupportedError,
        lambda: without_data(4).numpy(),
        """numpy() needs values and this tensor has none
  tensor  f32[4](S(0), S(0)) on Mesh(dp=2, tp=4)
  fix     explain and meta tensors know shapes only: keep value-dependent code outside""",
    ),
    "writing to elements that share memory": (
        loom.ViewError,
        view_write,
        """add_ cannot write into this view: elements of it share memory
  view  f32[2, 48](R, R) on Mesh(dp=2, tp=4)
  fix   write to the base, or take a copy first: view.clone().add_(...)""",
    ),
    "in place with a larger result": (
        loom.ShapeError,
        lambda: loom.ones(1, 8, mesh=MESH).add_(x()),
        """add_ would give shape [16, 8], which does not fit into its target
  target  f32[1, 8](S(0), S(0)) on Mesh(dp=2, tp=4)
  fix     use add without the underscore""",
    ),
    "in place with a wider dtype": (
        loom.DTypeError,
        lambda: loom.arange(8, mesh=MESH).div_(2),
        """div_ gives a dtype that i64 cannot hold
  target  i64[8](S(0), S(0)) on Mesh(dp=2, tp=4)""",
    ),
    "a partial sum of bool": (
        loom.DTypeError,
        lambda: loom.full((4,), True, mesh=MESH, placements="P(sum), R"),
        """P(sum) has no meaning for bool
  fix  use P(max) for any, P(min) for all""",
    ),
    "a partial mean of integers": (
        loom.DTypeError,
        lambda: loom.arange(4, mesh=MESH, placements="P(mean), R"),
        """P(mean) has no meaning for i64
  fix  use P(sum), or cast to a floating dtype""",
    ),
    "a negative size": (
        loom.ShapeError,
        lambda: loom.ones(-1, mesh=MESH),
        """-1 is not a size
  asked  [-1]
  fix    sizes are whole numbers, 0 or more""",
    ),
    "an unknown keyword": (
        loom.ArgumentError,
        lambda: x().sum(foo=1),
        """sum: got an unexpected keyword argument 'foo'
  call  sum(f32[16, 8](S(0), R))
  mesh  Mesh(dp=2, tp=4)
  fix   call it as sum(input, dim=None, keepdim=False, *, dtype=None)""",
    ),
    "too few parts": (
        loom.ShapeError,
        lambda: loom.from_local(parts(2, 2, 2), MESH, "S(0), R"),
        """3 parts for 8 devices
  mesh  Mesh(dp=2, tp=4)
  fix   give one part per device""",
    ),
    "a missing part": (
        loom.ShapeError,
        lambda: loom.from_local({(0,): torch.ones(1)}, PAIR, "S(0)"),
        """there is no part for coordinate (1,)
  mesh  Mesh(d=2)
  fix   give one part per device""",
    ),
    "ragged parts": (
        loom.PlacementError,
        lambda: loom.from_local(parts(1, 2), PAIR, "S(0)"),
        """the part at (0,) has shape [1] and its placements give it [2]
  tensor  f32[3](S(0)) on Mesh(d=2)
  parts   (0,): [2], (1,): [1]
  fix     cut the parts as shown (chunks are as large as the first, the last ones smaller), """
        "or concatenate them and use loom.distribute",
    ),
    "parts that are not equal": (
        loom.PlacementError,
        lambda: loom.from_local([torch.ones(1), torch.zeros(1)], PAIR, "R"),
        """the parts at (0,) and (1,) differ and the placements say they are the same
  tensor  f32[1](R) on Mesh(d=2)
  asked   (R)
  fix     use Partial for parts that add up, Shard for parts that follow each other""",
    ),
    "parts of two dtypes": (
        loom.PlacementError,
        lambda: loom.from_local([torch.ones(1), torch.ones(1).int()], PAIR, "S(0)"),
        """the part at (1,) is i32 and the first is f32
  tensor  f32[2](S(0)) on Mesh(d=2)
  fix     cast the parts to one dtype""",
    ),
    "a transform": (
        loom.UnsupportedError,
        lambda: torch.func.vmap(lambda row: x() + row)(torch.ones(3, 8)),
        """torch.func transforms do not work on meshloom tensors
  fix  use backward() or torch.autograd.grad for gradients; shard a batch dim instead of vmap""",
    ),
    "no operand on a mesh": (
        loom.MeshError,
        lambda: loom.matmul(torch.ones(2, 2), torch.ones(2, 2)),
        """matmul got no meshloom tensor
  fix  put an operand on a mesh with loom.distribute""",
    ),
    "a machine without bandwidth": (
        loom.ArgumentError,
        lambda: loom.Machine("m", 1, 0, 1, 1),
        """bandwidth of machine 'm' is 0
  fix  give a number above 0""",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_whole_message_is(name):
    kind, act, expected = CASES[name]
    with pytest.raises(kind) as caught:
        act()
    assert type(caught.value) is kind
    assert str(caught.value) == expected


def test_a_chosen_row_that_the_op_lacks_is_named_with_its_rows():
    with pytest.raises(loom.ArgumentError) as caught, loom.choose(dp="diagonal"):
        x() @ w()
    assert str(caught.value) == (
        """the op has no row 'diagonal' for axis 'dp'
  call  matmul(f32[16, 8](S(0), R), f32[8, 12](R, S(1)))
  mesh  Mesh(dp=2, tp=4)
  fix   its rows are m, n, k, P(sum), none"""
    )


def test_a_choice_for_an_axis_that_the_mesh_lacks_is_an_error():
    with pytest.raises(loom.MeshError, match="the mesh has no axis 'tq'"), loom.choose(tq="row"):
        x() @ w()


def test_a_value_that_does_not_fit_an_index_is_named():
    with pytest.raises(loom.ShapeError) as caught:
        set_item(0, torch.ones(3))
    assert str(caught.value).splitlines()[:3] == [
        "a value of shape [3] does not fit into x[index]",
        "  tensor  f32[16, 8](S(0), R) on Mesh(dp=2, tp=4)",
        "  index   (0, slice(0, 8, 1))",
    ]


def test_a_function_that_needs_values_says_so_on_meta():
    with pytest.raises(loom.UnsupportedError) as caught:
        torch.nonzero(without_data(4))
    lines = str(caught.value).splitlines()
    assert lines[0] == "nonzero cannot run on shapes alone"
    assert lines[-1] == "  fix     its result depends on values: leave it out of explain and of meta programs"


def here(act: Callable[[], Any]) -> str:
    """The line of this file that a lambda stands on."""
    return f"test_errors.py:{act.__code__.co_firstlineno}"


FORBIDDEN: dict[str, tuple[Callable[[], Any], str, int, str]] = {
    "sum": (lambda: x().sum(), "sum", 4, "all_reduce(sum) over dp of 2: 4 B (forward)"),
    "matmul": (lambda: x().T @ x(), "matmul", 256, "all_reduce(sum) over dp of 2: 256 B (forward)"),
    "redistribute": (
        lambda: x().redistribute("R, R"),
        "redistribute",
        256,
        "all_gather over dp of 2: 256 B (forward)",
    ),
    "to_torch": (lambda: x().to_torch(), "to_torch", 256, "all_gather over dp of 2: 256 B (forward)"),
    "fallback": (lambda: torch.block_diag(x()), "block_diag", 256, "all_gather over dp of 2: 256 B (forward)"),
    "item": (lambda: number().item(), "item", 6, "all_reduce(sum) over tp of 4: 6 B (forward)"),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_communication_names_op_bytes_and_line(name):
    act, op, size, move = FORBIDDEN[name]
    with pytest.raises(loom.CommunicationError) as caught, loom.communication("forbid"):
        act()
    where = str(caught.value).splitlines()[1]
    assert where.startswith("  where  test_errors.py:")
    assert str(caught.value) == (
        f"""{op} would communicate {size} B per device where communication is forbidden
{where}
  moves  {move}
  fix    place the operands so that they line up, ask for another output, or allow it here"""
    )
    assert int(where.rsplit(":", 1)[1]) in range(act.__code__.co_firstlineno, act.__code__.co_firstlineno + 3)


def test_communication_forbidden_in_backward_names_the_line_of_the_forward_op():
    a = loom.ones(8, 4, mesh=MESH, placements={"dp": Shard(0)})
    p = loom.Parameter(torch.ones(4, 4), MESH, "R, R")
    seed = loom.ones(8, 4, mesh=MESH, placements={"dp": Shard(0)})
    line = here(lambda: None)
    with pytest.raises(loom.CommunicationError) as caught, loom.communication("forbid"):
        y = a @ (p * 2)
        y.backward(seed)
    line = f"test_errors.py:{int(line.split(':')[1]) + 2}"
    assert str(caught.value) == (
        f"""matmul would communicate 64 B per device where communication is forbidden
  where  {line}
  moves  all_reduce(sum) over dp of 2: 64 B (backward)
  fix    place the operands so that they line up, ask for another output, or allow it here"""
    )


def test_the_sum_of_a_replicated_leaf_is_forbidden_and_its_parts_are_kept():
    a = loom.ones(8, 4, mesh=MESH, placements={"dp": Shard(0)})
    p = loom.Parameter(torch.ones(4, 4), MESH, "R, R")
    y = a @ p
    with loom.communication("forbid"), pytest.raises(loom.CommunicationError, match="matmul would communicate 64 B"):
        y.backward(loom.ones(8, 4, mesh=MESH, placements={"dp": Shard(0)}))
    with pytest.raises(loom.GradientError, match="not summed over the devices yet"):
        p.grad  # noqa: B018
    loom.synchronize()
    assert torch.equal(p.grad.to_torch(), torch.full((4, 4), 8.0))


MUTATIONS: dict[str, Callable[[loom.Tensor], Any]] = {
    "add_ of a wrong shape": lambda t: t.add_(torch.ones(3)),
    "add_ of another mesh": lambda t: t.add_(loom.ones(8, mesh=Mesh(all=8))),
    "mul_ with a larger result": lambda t: t.mul_(torch.ones(2, 16, 8)),
    "div_ into integers": lambda t: t.div_(2),
    "copy_ of a wrong shape": lambda t: t.copy_(torch.ones(3, 3)),
    "an index out of range": lambda t: t.__setitem__(99, 1),
    "a value of a wrong shape": lambda t: t.__setitem__(0, torch.ones(3, dtype=t.dtype)),
    "out= of a wrong shape": lambda t: torch.add(torch.ones(3), loom.ones(3, mesh=MESH), out=t),
    "out= of a narrower dtype": lambda t: torch.add(loom.ones(16, 8, mesh=MESH), 1.5, out=t),
    "requires_grad_ of integers": lambda t: t.requires_grad_(),
}


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("placements", ["S(0), R", "R, S(1)", "P(sum), R", "S(0), S(0)"])
def test_nothing_mutates_before_the_checks_pass(name, placements):
    target = loom.distribute(torch.arange(128).view(16, 8), MESH, placements)
    before, topology = target._data.clone(), target.topology
    with pytest.raises(loom.MeshloomError):
        MUTATIONS[name](target)
    assert torch.equal(target._data, before)
    assert target.topology is topology and not target.requires_grad


@pytest.mark.parametrize("act", [lambda t: t.add_(w8()), lambda t: t.copy_(w8()), lambda t: t.__setitem__(0, w8()[0])])
def test_nothing_mutates_when_communication_is_forbidden(act):
    target = loom.zeros(16, 8, mesh=MESH, placements="S(1), R")
    with pytest.raises(loom.CommunicationError), loom.communication("forbid"):
        act(target)
    assert not target.to_torch().any()


def w8() -> loom.Tensor:
    return loom.ones(16, 8, mesh=MESH, placements="R, S(1)")


def test_every_error_is_of_the_tree_and_of_a_fitting_builtin():
    tree = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, loom.MeshloomError)]
    assert len(tree) > 20
    for kind in tree[1:]:
        first, *more = [base.__name__ for base in kind.__bases__ if base is not loom.MeshloomError]
        assert more in ([], ["RuntimeError"])
        assert f"{kind.__name__:<20} {first}{' *' if more else ''} " in errors.__doc__
        assert getattr(loom, kind.__name__) is kind


# Calls that torch refuses, as functions of a tensor of [16, 8] and one of [8, 12]; ours is refused by the same class.
REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "matmul of other sizes": lambda a, b: a @ a,
    "mm of other dims": lambda a, b: torch.mm(a, b[0]),
    "bmm of matrices": lambda a, b: torch.bmm(a, b),
    "linear": lambda a, b: F.linear(a, b),
    "sizes that do not broadcast": lambda a, b: a + b,
    "in place": lambda a, b: a.clone().add_(b),
    "reshape": lambda a, b: a.reshape(7, 5),
    "view": lambda a, b: a.view(7, 5),
    "expand": lambda a, b: a.expand(3, 3),
    "permute": lambda a, b: a.permute(0, 0),
    "cat": lambda a, b: torch.cat([a, b], 0),
    "stack": lambda a, b: torch.stack([a, b]),
    "split": lambda a, b: a.split([1, 2]),
    "a dim twice": lambda a, b: a.sum((0, 0)),
    "topk": lambda a, b: a.topk(100),
    "einsum": lambda a, b: torch.einsum("ij,ij->i", a, b),
    "gather of other dims": lambda a, b: a.gather(0, torch.zeros(3, dtype=torch.int64)),
    "gather out of range": lambda a, b: a.gather(0, torch.full((1, 8), 99)),
    "index_select out of range": lambda a, b: a.index_select(0, torch.tensor([99])),
    "mean of integers": lambda a, b: a.to(torch.int64).mean(),
    "layer_norm": lambda a, b: F.layer_norm(a, (5,)),
    "conv2d": lambda a, b: F.conv2d(a, b),
    "a bool of many": lambda a, b: bool(a),
    "item of many": lambda a, b: a.item(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_with_a_runtime_error_we_refuse_with_one_too(name):
    a, b = torch.ones(16, 8), torch.ones(8, 12)
    with pytest.raises(Exception) as theirs:
        REFUSED[name](a, b)
    with pytest.raises(Exception) as ours:
        REFUSED[name](x(), w())
    assert not issubclass(theirs.type, RuntimeError) or issubclass(ours.type, RuntimeError), (theirs.value, ours.value)
    assert issubclass(theirs.type, (RuntimeError, IndexError, ValueError, TypeError))


def test_details_that_are_none_are_left_out_and_lines_align():
    error = loom.ShapeError("sizes differ", tensor="f32[4]", mesh=None, fix="one\ntwo")
    assert str(error) == "sizes differ\n  tensor  f32[4]\n  fix     one\n          two"


def test_an_error_survives_pickling_with_its_details():
    error = loom.ShapeError("sizes differ", tensor="f32[4]", fix="pad")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is loom.ShapeError and str(copy) == str(error) and copy.headline == "sizes differ"


def test_what_cannot_become_a_tensor_is_an_error_of_ours():
    with pytest.raises(loom.ArgumentError) as caught:
        loom.distribute("a", Mesh(d=2))
    assert str(caught.value).splitlines() == [
        "a str cannot become a tensor",
        "  reason  new(): invalid data type 'str'",
        "  fix     give a torch tensor, an array or numbers",
    ]
