"""What people give by mistake, as a table: each line is a call, the class of its error, and a piece of its message.

To add one, write a line. `w` has what the calls need: a mesh `m` with a tensor `x`, a runtime mesh `device` with a
`buffer`, ttnn meshes `ttnn_device` (1x4) and `ttnn_pair` (1x2). Every error is ours.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import meshloom as loom
from meshloom import runtime, ttnn
from meshloom.cli import main
from meshloom.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    FabricError,
    GradientError,
    MeshError,
    MeshloomError,
    NotationError,
    OperandError,
    OutOfMemoryError,
    PlacementError,
    ShapeError,
)


class Bad(NamedTuple):
    """A call, and what it ends in."""

    call: Callable[[Any], Any]
    kind: type[MeshloomError]
    says: str


@pytest.fixture(scope="module")
def w() -> Iterator[SimpleNamespace]:
    m = loom.Mesh(x0=2)
    with (
        runtime.open_mesh_device((2,)) as device,
        ttnn.create_mesh_device(ttnn.MeshShape(1, 4)) as four,
        ttnn.create_mesh_device(ttnn.MeshShape(1, 2)) as pair,
    ):
        buffer = runtime.create_mesh_buffer(device, global_shape=(4,))
        x = loom.ones(4, 4, mesh=m)
        yield SimpleNamespace(m=m, device=device, buffer=buffer, ttnn_device=four, ttnn_pair=pair, x=x)


TABLE = [
    Bad(lambda w: runtime.open_mesh_device(["/tmp/nothing7"], (1,)), ArgumentError, "'/tmp/nothing7' names no device"),
    Bad(lambda w: runtime.open_mesh_device((2,), timeout=-1), ArgumentError, "timeout=-1 is no time to wait"),
    Bad(lambda w: runtime.open_mesh_device((2,), timeout="x"), ArgumentError, "timeout='x' is of type str"),
    Bad(
        lambda w: runtime.open_mesh_device((2,), timeout=float("nan")), ArgumentError, "timeout=nan is no time to wait"
    ),
    Bad(lambda w: runtime.open_mesh_device((2,), stress="x"), ArgumentError, "stress='x' is of type str"),
    Bad(lambda w: runtime.open_mesh_device((2,), stress=True), ArgumentError, "stress=True is of type bool"),
    Bad(
        lambda w: w.device.queue().enqueue_write(w.buffer, torch.ones(4, dtype=torch.complex64), blocking=True),
        DTypeError,
        "holds f32 and got complex numbers",
    ),
    Bad(
        lambda w: w.device.queue().enqueue_write(w.buffer, [1j, 2, 3, 4], blocking=True),
        DTypeError,
        "holds f32 and got complex numbers",
    ),
    Bad(
        lambda w: ttnn.from_torch(
            torch.ones(4, 4), device=w.ttnn_device, mesh_mapper=ttnn.ShardTensorToMesh(w.ttnn_pair, dim=0)
        ),
        OperandError,
        "the mapper is for a mesh of shape [1, 2] and the dev",
    ),
    Bad(
        lambda w: ttnn.from_torch(
            torch.ones(4, 4), device=w.ttnn_device, mesh_mapper=ttnn.ReplicateTensorToMesh(w.ttnn_pair)
        ),
        OperandError,
        "the mapper is for a mesh of shape [1, 2] and the dev",
    ),
    Bad(lambda w: w.device.queue(-1), MeshError, "there is no queue -1: 1 were opened"),
    Bad(lambda w: w.device.queue("x"), ArgumentError, "cq_id='x' is of type str"),
    Bad(lambda w: w.device.queue(None), ArgumentError, "cq_id=None is of type NoneType"),
    Bad(lambda w: runtime.open_mesh_device((2,), mesh_type="Rung"), ArgumentError, "there is no mesh type 'Rung'"),
    Bad(
        lambda w: ttnn.open_mesh_device(ttnn.MeshShape(1, 2), mesh_type="Rung"),
        ArgumentError,
        "there is no mesh type 'Rung'",
    ),
    Bad(lambda w: runtime.open_mesh_device((2,), mesh_type=5), ArgumentError, "there is no mesh type 5"),
    Bad(lambda w: runtime.open_mesh_device((2,), memory="1GB"), ArgumentError, "memory='1GB' is not a size"),
    Bad(lambda w: runtime.open_mesh_device((2,), memory=-1), ArgumentError, "memory=-1 is not a size"),
    Bad(lambda w: runtime.open_mesh_device((2,), memory=float("nan")), ArgumentError, "memory=nan is not a size"),
    Bad(lambda w: runtime.open_mesh_device((2,), preset="nope"), FabricError, "no preset is called 'nope'"),
    Bad(lambda w: runtime.open_mesh_device((2,), preset=5), ArgumentError, "preset=5 is of type int"),
    Bad(lambda w: runtime.open_mesh_device((2,), driver=object()), ArgumentError, "driver="),
    Bad(
        lambda w: runtime.open_mesh_device((2,), driver=runtime.VirtualDriver),
        ArgumentError,
        "driver=VirtualDriver is a class",
    ),
    Bad(
        lambda w: runtime.create_mesh_buffer(None),
        ArgumentError,
        "a buffer is on a MeshDevice, not on None",
    ),
    Bad(
        lambda w: runtime.create_mesh_buffer(5, global_shape=(2,)),
        ArgumentError,
        "a buffer is on a MeshDevice, not on 5",
    ),
    Bad(
        lambda w: runtime.create_mesh_buffer(w.m, global_shape=(2,)),
        ArgumentError,
        "a buffer is on a MeshDevice, not on Mesh(x0=2)",
    ),
    Bad(
        lambda w: runtime.MeshWorkload().add_program("all", runtime.Program(lambda x: None, updates=[w.buffer])),
        MeshError,
        "'all' is no range of coordinates",
    ),
    Bad(
        lambda w: runtime.MeshWorkload().add_program(5, runtime.Program(lambda x: None, updates=[w.buffer])),
        MeshError,
        "5 is no range of coordinates",
    ),
    Bad(lambda w: runtime.MeshWorkload().add_program(None, 5), ArgumentError, "add_program takes a Program, not 5"),
    Bad(lambda w: runtime.Program(lambda x: None, updates=[5]), ArgumentError, "updates=[5] is no list of buffers"),
    Bad(
        lambda w: runtime.Program(lambda x: None, updates=w.buffer),
        ArgumentError,
        "is no list of buffers",
    ),
    Bad(lambda w: runtime.Program(lambda x: None, updates=[w.buffer], args=5), ArgumentError, "args=5 is of type int"),
    Bad(lambda w: w.device.queue().enqueue_workload(None), ArgumentError, "workload=None is of type NoneType"),
    Bad(lambda w: w.device.queue().enqueue_write(None, [1]), ArgumentError, "None is not a MeshBuffer"),
    Bad(lambda w: w.device.queue().enqueue_read(5), ArgumentError, "5 is not a MeshBuffer"),
    Bad(lambda w: w.device.queue().wait_for_event(None), ArgumentError, "event=None is of type NoneType"),
    Bad(lambda w: w.device.execute_trace(None), ArgumentError, "trace=None is no trace"),
    Bad(lambda w: w.device.end_trace_capture(None), ArgumentError, "trace=None is of type NoneType"),
    Bad(lambda w: w.device.release_trace(None), ArgumentError, "trace=None is of type NoneType"),
    Bad(lambda w: loom.communication("warn", above="x").__enter__(), ArgumentError, "above='x' is no number of bytes"),
    Bad(lambda w: loom.communication("forbid", above=-1).__enter__(), ArgumentError, "above=-1 is no number of bytes"),
    Bad(lambda w: loom.communication("maybe").__enter__(), ArgumentError, "communication level 'maybe' is not known"),
    Bad(lambda w: loom.parse(None), ArgumentError, "text=None is of type NoneType"),
    Bad(lambda w: loom.parse(5), ArgumentError, "text=5 is of type int"),
    Bad(lambda w: loom.explain(5), ArgumentError, "explain takes a program, not 5"),
    Bad(lambda w: loom.explain(None), ArgumentError, "explain takes a program, not None"),
    Bad(lambda w: runtime.close_mesh_device(None), ArgumentError, "mesh=None is of type NoneType"),
    Bad(lambda w: runtime.synchronize_mesh_device(None), ArgumentError, "mesh=None is of type NoneType"),
    Bad(lambda w: ttnn.close_mesh_device(None), ArgumentError, "mesh_device=None is of type NoneType"),
    Bad(lambda w: ttnn.synchronize_device(None), ArgumentError, "device=None is not a MeshDevice"),
    Bad(lambda w: runtime.enqueue_mesh_workload(None, None), ArgumentError, "mesh=None is of type NoneType"),
    Bad(
        lambda w: ttnn.from_torch(torch.ones(4), device=w.ttnn_device, mesh_mapper=lambda x: x),
        ArgumentError,
        "mesh_mapper=",
    ),
    Bad(lambda w: ttnn.as_tensor(torch.ones(4), mesh_mapper=lambda x: x), ArgumentError, "mesh_mapper="),
    Bad(
        lambda w: ttnn.to_torch(ttnn.from_torch(torch.ones(4)), mesh_composer=lambda x: x),
        OperandError,
        "ttnn.to_torch cannot take these operands: 'function'",
    ),
    Bad(
        lambda w: loom.distribute(torch.eye(3).to_sparse(), w.m), ArgumentError, "a sparse tensor cannot lie on a mesh"
    ),
    Bad(
        lambda w: loom.distribute(torch.eye(3).to_sparse_csr(), w.m),
        ArgumentError,
        "a sparse tensor cannot lie on a mesh",
    ),
    Bad(
        lambda w: loom.distribute(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), w.m),
        ArgumentError,
        "a nested tensor cannot lie on a mesh",
    ),
    Bad(
        lambda w: loom.distribute(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8), w.m),
        ArgumentError,
        "a quantized tensor cannot lie on a mesh",
    ),
    Bad(
        lambda w: loom.distribute(torch.ones(4, 4).to_mkldnn(), w.m),
        ArgumentError,
        "a mkldnn tensor cannot lie on a mesh",
    ),
    Bad(
        lambda w: loom.from_local([torch.eye(3).to_sparse()] * 2, w.m, "S(0)"),
        ArgumentError,
        "a sparse tensor cannot lie on a mesh",
    ),
    Bad(lambda w: w.x @ w.x.double(), OperandError, "expected m1 and m2 to have the same dtype, but got:"),
    Bad(lambda w: w.x.cuda(), ArgumentError, "device='cuda' cannot be used"),
    Bad(lambda w: w.x.to("cuda"), ArgumentError, "device='cuda' cannot be used"),
    Bad(lambda w: loom.ones(4, mesh=w.m, device="cuda"), ArgumentError, "device='cuda' cannot be used"),
    Bad(
        lambda w: loom.Parameter(torch.ones(4, dtype=torch.int64), w.m),
        GradientError,
        "a parameter of i64 has no gradient",
    ),
    Bad(lambda w: loom.zeros(10**14, mesh=w.m), OutOfMemoryError, "a tensor of"),
    Bad(lambda w: loom.randn(10**7, 10**7, mesh=w.m), OutOfMemoryError, "a tensor of"),
    Bad(lambda w: loom.distribute(None, w.m), ArgumentError, "a NoneType cannot become a tensor"),
    Bad(lambda w: loom.distribute("abc", w.m), ArgumentError, "a str cannot become a tensor"),
    Bad(lambda w: loom.ones(4, mesh=w.m, device="nope"), ArgumentError, "device='nope' cannot be used"),
    Bad(lambda w: loom.ones(4, mesh=w.m, dtype="nope"), NotationError, "'nope' is not a dtype"),
    Bad(lambda w: runtime.open_mesh_device((2,), num_command_queues=0), ArgumentError, "num_command_queues=0"),
    Bad(lambda w: runtime.open_mesh_device((2,), check="x"), ArgumentError, "there is no check 'x'"),
    Bad(lambda w: runtime.open_mesh_device((2,), dispatch="x"), ArgumentError, "there is no dispatch 'x'"),
    Bad(lambda w: runtime.open_mesh_device((0,)), MeshError, "axis 'x0' has size 0"),
    Bad(lambda w: runtime.open_mesh_device((-1,)), MeshError, "MeshShape takes whole numbers, not ((-1,),)"),
    Bad(lambda w: runtime.open_mesh_device("abc"), MeshError, "MeshShape takes whole numbers, not ('abc',)"),
    Bad(lambda w: runtime.open_mesh_device(2.5), ArgumentError, "2.5 is neither a shape nor a list of devices"),
    Bad(lambda w: runtime.open_mesh_device((2,), ["a", "b"]), ArgumentError, "'a' names no device"),
    Bad(lambda w: runtime.open_mesh_device((2,), [0, 0]), MeshError, "a device id stands twice"),
    Bad(lambda w: runtime.open_mesh_device((2,), [None, 1]), ArgumentError, "None is neither a size nor a device"),
    Bad(
        lambda w: runtime.open_mesh_device((2,), axes=("a", "b")), MeshError, "1 sizes and 2 axis names do not pair up"
    ),
    Bad(lambda w: runtime.open_mesh_device((2,), axes=5), MeshError, "axes=5 is of type int"),
    Bad(lambda w: runtime.open_mesh_device((2,), cache=5), ArgumentError, "cache=5 is of type int"),
    Bad(lambda w: loom.distribute(torch.ones(4), w.m, 5), PlacementError, "5 is not a placement"),
    Bad(lambda w: loom.ones(4, mesh=5), MeshError, "mesh= takes a mesh, not 5"),
    Bad(lambda w: loom.open_mesh("ab"), MeshError, "axis 'x0' has size 'a'"),
    Bad(lambda w: loom.open_mesh((2,), axes="ab"), MeshError, "1 sizes and 2 axis names do not pair up"),
    Bad(lambda w: loom.open_mesh(2.5), MeshError, "shape=2.5 is of type float"),
    Bad(lambda w: loom.open_mesh((0,)), MeshError, "axis 'x0' has size 0"),
    Bad(lambda w: loom.open_mesh((2,), device_ids=[1]), MeshError, "a mesh of shape (2,) needs 2 device ids and got 1"),
    Bad(lambda w: loom.open_mesh((2,), device_ids=5), MeshError, "device_ids=5 is of type int"),
    Bad(
        lambda w: loom.open_mesh((4,), physical=(3,)), MeshError, "a virtual mesh of shape (4,) does not lie evenly on"
    ),
    Bad(lambda w: loom.open_mesh((4,), physical=5), MeshError, "physical=5 is of type int"),
    Bad(
        lambda w: loom.open_mesh((4,), processes=(3,)),
        MeshError,
        "a grid of (3,) processes does not cut a mesh of shap",
    ),
    Bad(lambda w: loom.open_mesh((4,), processes=5), MeshError, "processes=5 is of type int"),
    Bad(lambda w: loom.open_mesh((4,), timeout="x"), ArgumentError, "timeout 'x' is not a number of seconds"),
    Bad(lambda w: loom.open_mesh((4,), check="x"), ArgumentError, "check 'x' is not known"),
    Bad(lambda w: w.m.submesh(q=1), MeshError, "the mesh has no axis 'q'"),
    Bad(lambda w: w.m.submesh(x0="a"), MeshError, "place a is out of range for axis 'x0' of size 2"),
    Bad(lambda w: w.m.reshape(a=3), MeshError, "2 devices cannot be reshaped to 3"),
    Bad(lambda w: w.m.check(5), MeshError, "coordinate (5,) is not on the mesh"),
    Bad(lambda w: w.m.check("ab"), MeshError, "coordinate ('a', 'b') is not on the mesh"),
    Bad(lambda w: w.m.check((0.5,)), MeshError, "coordinate (0.5,) is not on the mesh"),
    Bad(lambda w: w.m.axis("q"), MeshError, "the mesh has no axis 'q'"),
    Bad(lambda w: w.m.axis(1.5), MeshError, "axis 1.5 is out of range for 1 axes"),
    Bad(lambda w: w.m.axis(None), MeshError, "axis None is out of range for 1 axes"),
    Bad(lambda w: w.m.index((5,)), MeshError, "coordinate (5,) is not on the mesh"),
    Bad(
        lambda w: runtime.create_mesh_buffer(w.device, layout="x", global_shape=(2,)),
        ArgumentError,
        "there is no layout 'x'",
    ),
    Bad(
        lambda w: runtime.create_mesh_buffer(w.device, layout="sharded", global_shape=(4,)),
        ArgumentError,
        "a sharded buffer needs global_shape and shard_shape",
    ),
    Bad(
        lambda w: runtime.create_mesh_buffer(w.device, global_shape=(4,), dtype="nope"),
        NotationError,
        "'nope' is not a dtype",
    ),
    Bad(lambda w: runtime.create_mesh_buffer(w.device, global_shape="abc"), ShapeError, "shape is ('a', 'b', 'c')"),
    Bad(lambda w: runtime.create_mesh_buffer(w.device, global_shape=(-4,)), ShapeError, "shape is (-4,)"),
    Bad(
        lambda w: runtime.create_mesh_buffer(w.device, global_shape=(4,), buffer_type="x"),
        ArgumentError,
        "there is no memory 'x'",
    ),
    Bad(lambda w: runtime.create_mesh_buffer(w.device, global_shape=(2.5,)), ShapeError, "shape is (2.5,)"),
    Bad(
        lambda w: runtime.create_mesh_buffer(w.device, global_shape=(4,), address="x"),
        ArgumentError,
        "address='x' is of type str",
    ),
    Bad(lambda w: runtime.create_mesh_buffer(w.device, global_shape=(4,), address=-5), ArgumentError, "address -"),
    Bad(lambda w: runtime.create_mesh_buffer(w.device, global_shape=(10**15,)), OutOfMemoryError, "buffer buffer"),
    Bad(
        lambda w: w.device.queue().enqueue_write(w.buffer, torch.ones(5), blocking=True),
        ShapeError,
        "takes f32[4] and got shape [5]",
    ),
    Bad(
        lambda w: w.device.queue().enqueue_write(w.buffer, "abc", blocking=True),
        ArgumentError,
        "a str cannot be written",
    ),
    Bad(
        lambda w: w.device.queue().enqueue_write(w.buffer, None, blocking=True),
        ArgumentError,
        "a NoneType cannot be written",
    ),
    Bad(
        lambda w: w.device.queue().enqueue_write(w.buffer, torch.ones(4), coordinate=(9,)),
        MeshError,
        "coordinate (9,) is not on the mesh",
    ),
    Bad(
        lambda w: w.device.queue().enqueue_write(w.buffer, torch.ones(4), coordinate=5),
        MeshError,
        "coordinate (5,) is not on the mesh",
    ),
    Bad(
        lambda w: w.device.queue().enqueue_write(w.buffer, torch.ones(4), coordinate=(0,), index="x", blocking=True),
        ShapeError,
        "'x' does not index [4]",
    ),
    Bad(
        lambda w: w.device.queue().enqueue_read(w.buffer, out=torch.ones(3)),
        DeviceError,
        "failed on the host",
    ),
    Bad(
        lambda w: w.device.queue().enqueue_read(w.buffer, out=5),
        DeviceError,
        "failed on the host",
    ),
    Bad(lambda w: w.device.queue().finish("x"), ArgumentError, "timeout='x' is of type str"),
    Bad(lambda w: w.device.queue().finish(-1), ArgumentError, "timeout=-1 is no time to wait"),
    Bad(lambda w: loom.from_buffer(None), ArgumentError, "buffer=None is of type NoneType"),
    Bad(lambda w: runtime.tilize(None), ArgumentError, "data=None is of type NoneType"),
    Bad(lambda w: w.device.create_submesh((5,)), MeshError, "a submesh of shape (5,) at (0,) does not fit"),
    Bad(lambda w: w.device.create_submesh(5), ArgumentError, "shape=5 is of type int"),
    Bad(lambda w: w.device.reshape(5), MeshError, "1 buffers lie on the mesh as it is: buffer"),
    Bad(lambda w: w.device.get_device(9), MeshError, "coordinate (9,) is not on the mesh"),
    Bad(lambda w: w.device.get_device("a"), MeshError, "coordinate ('a',) is not on the mesh"),
    Bad(lambda w: w.device.memory_usage("x"), ArgumentError, "there is no memory 'x'"),
    Bad(lambda w: runtime.MeshShape("a"), MeshError, "MeshShape takes whole numbers, not ('a',)"),
    Bad(lambda w: runtime.MeshShape(1.5), MeshError, "MeshShape takes whole numbers, not (1.5,)"),
    Bad(lambda w: runtime.MeshCoordinateRange((1,), (0,)), MeshError, "a range cannot go from (1,) to (0,)"),
    Bad(lambda w: runtime.MeshCoordinateRange(5), MeshError, "5 is no coordinate"),
    Bad(lambda w: runtime.Fault("x"), ArgumentError, "there is no fault 'x'"),
    Bad(lambda w: w.device.get_device(0).slow_down(launch="x"), ArgumentError, "launch='x' is of type str"),
    Bad(lambda w: w.device.get_device(0).slow_down(launch=-1), ArgumentError, "launch=-1 is no time to wait"),
    Bad(lambda w: runtime.VirtualDriver(5), ArgumentError, "ids=5 is of type int"),
    Bad(lambda w: runtime.VirtualDriver().open("x"), ArgumentError, "index='x' is of type str"),
    Bad(lambda w: w.x.redistribute("Q"), NotationError, "'Q' is not a placement"),
    Bad(lambda w: w.x.redistribute(5), PlacementError, "5 is not a placement"),
    Bad(lambda w: w.x.shard_at(5), MeshError, "coordinate (5,) is not on the mesh"),
    Bad(lambda w: w.x.shard_at("a"), MeshError, "coordinate ('a',) is not on the mesh"),
    Bad(lambda w: loom.from_local(5, w.m), ArgumentError, "parts=5 is of type int"),
    Bad(lambda w: loom.from_local([], w.m), ShapeError, "0 parts for 2 devices"),
    Bad(lambda w: loom.from_local(["a", "b"], w.m), ArgumentError, "a str cannot become a tensor"),
    Bad(lambda w: loom.full((2,), "a", mesh=w.m), ArgumentError, "fill_value='a' is no number"),
    Bad(lambda w: loom.full("a", 1, mesh=w.m), ShapeError, "'a' is not a size"),
    Bad(lambda w: loom.arange("a", mesh=w.m), ArgumentError, "arange('a',) cannot be made"),
    Bad(lambda w: loom.arange(0, 1, 0, mesh=w.m), ArgumentError, "arange(0, 1, 0) cannot be made"),
    Bad(lambda w: loom.randint(5, 0, (2,), mesh=w.m), ArgumentError, "randint needs low below high, not 5 and 0"),
    Bad(lambda w: loom.randn(4, mesh=w.m, generator=5), ArgumentError, "generator=5 is of type int"),
    Bad(lambda w: loom.zeros_like(5), ArgumentError, "input=5 is of type int"),
    Bad(lambda w: loom.randn_like(torch.ones(4)), ArgumentError, "input=tensor([1., 1., 1., 1.]) is of type Tensor"),
    Bad(lambda w: loom.fabric.preset("nope"), FabricError, "no preset is called 'nope'"),
    Bad(lambda w: loom.fabric.preset(5), FabricError, "no preset is called 5"),
    Bad(
        lambda w: loom.fabric.load_preset("/nope/none.toml"),
        FabricError,
        "/nope/none.toml cannot be read: No such file or dire",
    ),
    Bad(lambda w: loom.fabric.load_preset(5), ArgumentError, "path=5 is of type int"),
    Bad(lambda w: loom.use_machine(5).__enter__(), ArgumentError, "use_machine takes a Machine, not 5"),
    Bad(lambda w: loom.use_fabric(5).__enter__(), ArgumentError, "use_fabric takes a Fabric, not 5"),
    Bad(lambda w: loom.choose(matmul=5).__enter__(), ArgumentError, "matmul=5 is of type int"),
    Bad(lambda w: ttnn.open_mesh_device(ttnn.MeshShape(0, 1)), OperandError, "MeshShape([0, 1]) has no devices"),
    Bad(
        lambda w: ttnn.open_mesh_device(ttnn.MeshShape(1, 1), num_command_queues="x"),
        ArgumentError,
        "num_command_queues='x'",
    ),
    Bad(
        lambda w: ttnn.from_torch(5), ArgumentError, "ttnn.from_torch takes a torch.Tensor or a numpy array, not a int"
    ),
    Bad(
        lambda w: ttnn.from_torch(torch.ones(4), dtype="x"),
        ArgumentError,
        "ttnn.from_torch: dtype='x' is of the wrong type",
    ),
    Bad(
        lambda w: ttnn.from_torch(torch.ones(4), layout="x"),
        ArgumentError,
        "ttnn.from_torch: layout='x' is of the wrong type",
    ),
    Bad(lambda w: ttnn.from_torch(torch.ones(4), device=5), ArgumentError, "5 is not a MeshDevice"),
    Bad(lambda w: ttnn.from_torch(torch.eye(3).to_sparse()), ArgumentError, "ttnn.from_torch takes a dense tensor"),
    Bad(lambda w: ttnn.to_torch(5), ArgumentError, "ttnn.to_torch takes a ttnn.Tensor, not a int"),
    Bad(lambda w: ttnn.add(5, 5), ArgumentError, "ttnn.add takes tensors and numbers, not int and int"),
    Bad(lambda w: ttnn.to_device(ttnn.from_torch(torch.ones(4)), 5), ArgumentError, "5 is not a MeshDevice"),
    Bad(lambda w: ttnn.dump_tensor(5, ttnn.from_torch(torch.ones(4))), ArgumentError, "file_name=5 is of type int"),
    Bad(lambda w: ttnn.load_tensor(5), ArgumentError, "file_name=5 is of type int"),
    Bad(lambda w: ttnn.ShardTensorToMesh(5, dim=0), ArgumentError, "5 is not a MeshDevice"),
    Bad(lambda w: ttnn.ShardTensorToMesh(w.ttnn_device, dim="x"), ArgumentError, "dim='x' is of type str"),
    Bad(
        lambda w: ttnn.from_torch(torch.ones(4), mesh_mapper=ttnn.ShardTensorToMesh(w.ttnn_device, dim=9)),
        OperandError,
        "Invalid dimension index; got dims: {9}, tensor dimen",
    ),
    Bad(
        lambda w: ttnn.all_gather(ttnn.from_torch(torch.ones(4, 4), device=w.ttnn_device), dim=9),
        OperandError,
        "ttnn.all_gather: Invalid gather dim 9 for 2D input t",
    ),
    Bad(lambda w: ttnn.all_gather(5, dim=0), ArgumentError, "ttnn.all_gather: operand 0 is a int, not a ttnn.Tens"),
]


@pytest.mark.parametrize("bad", TABLE, ids=[str(number) for number in range(len(TABLE))])
def test_bad_input_is_an_error_of_ours(w, bad):
    check_refused(w, bad)


def check_refused(w, bad):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*(Sparse CSR|nested tensors|quantize)")  # torch's, of making them
        with pytest.raises(MeshloomError) as caught:
            pytest.fail(f"it was accepted: {bad.call(w)!r:.100}")
    assert type(caught.value) is bad.kind, caught.value
    assert bad.says in caught.value.headline


def test_the_table_finds_what_is_accepted_and_what_is_foreign(w):
    for bad in (
        Bad(lambda w: 5, ArgumentError, ""),
        Bad(lambda w: [][0], ArgumentError, ""),
        Bad(lambda w: loom.parse(None), MeshError, "text=None"),
        Bad(lambda w: loom.parse(None), ArgumentError, "something else"),
    ):
        with pytest.raises((AssertionError, IndexError, pytest.fail.Exception)):
            check_refused(w, bad)


def test_a_queue_below_zero_is_told_how_queues_are_numbered(w):
    with pytest.raises(MeshError) as caught:
        w.device.queue(-1)
    assert caught.value.details["fix"] == "queues are numbered from 0 to 0"
    with pytest.raises(MeshError) as caught:
        w.device.queue(2)
    assert "num_command_queues=3" in caught.value.details["fix"]


def test_the_text_of_a_padded_meta_tensor_has_its_own_shape():
    text = repr(loom.zeros(5, 4, mesh=loom.Mesh(x=8), placements="S(0)", device="meta"))
    assert text == "Tensor f32[5, 4](S(0)) on Mesh(x=8)\ntensor(..., device='meta', size=(5, 4))"


def test_a_ttnn_tensor_is_copied_on_its_mesh_and_pickled_to_the_host(w):
    x = ttnn.from_torch(torch.arange(4.0), device=w.ttnn_device)
    copied = copy.deepcopy({"x": x})["x"]
    ttnn.deallocate(x)
    assert copied.device() is w.ttnn_device
    assert ttnn.to_torch(ttnn.get_device_tensors(copied)[0]).tolist() == [0, 1, 2, 3]
    file = io.BytesIO()
    torch.save(copied, file)
    file.seek(0)
    for read in (pickle.loads(pickle.dumps(copied)), torch.load(file)):
        assert read.device() is None and read.tensor_topology() == copied.tensor_topology()
        assert ttnn.to_torch(ttnn.get_device_tensors(read)[0]).tolist() == [0, 1, 2, 3]
    host = ttnn.from_torch(torch.arange(4.0))
    assert ttnn.to_torch(pickle.loads(pickle.dumps(host))).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys\nsys.exit(5)", "ended with exit code 5 before it opened a mesh"),
        ("def f(:\n  pass", "failed with SyntaxError in line 1"),
        ("1 / 0", "failed with ZeroDivisionError"),
    ],
)
def test_the_doctor_does_not_judge_a_script_that_never_opened_a_mesh(tmp_path, capsys, text, says):
    script = tmp_path / "script.py"
    script.write_text(text)
    assert main(["doctor", str(script)]) == 1
    told = capsys.readouterr()
    assert says in told.err and "[ok]" not in told.out + told.err


def test_the_doctor_refuses_a_system_that_nobody_knows(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MESHLOOM_SYSTEM", "")  # so that what the command sets is taken back
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError('it has run')")
    assert main(["doctor", "--system", "Bogus", str(script)]) == 1
    told = capsys.readouterr()
    assert "Bogus" in told.err and "it has run" not in told.err
