"""Sockets: a way from some devices of a mesh to those of another, first in, first out.

What is sent is a copy; what is received goes into a tensor that is there, at the receiving coordinates alone. Ops run
in the order of the program, so a tensor has to be sent before it can be received: where devices would wait for ever,
this is an error. Between processes, the sender and the receiver are named by their ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from meshloom.errors import ArgumentError, OperandError, UnsupportedError, where
from meshloom.runtime import MeshCoordinate
from meshloom.ttnn.choices import Choice
from meshloom.ttnn.collectives.groups import GroupCall
from meshloom.ttnn.device import processes, queues
from meshloom.ttnn.device.cores import CoreCoord
from meshloom.ttnn.device.fabric import FabricNodeId
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.device.subdevices import SubDeviceId
from meshloom.ttnn.ops.calling import op, operands
from meshloom.ttnn.tensor.formats import DataType
from meshloom.ttnn.tensor.memory import BufferType, room_on
from meshloom.ttnn.tensor.parts import Block, part
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import TensorTopology

__all__ = (
    "MeshCoreCoord MeshSocket SocketConfig SocketConnection SocketEndpoint SocketMemoryConfig create_socket_pair"
).split()


@dataclass
class MeshCoreCoord:
    """A core of a device of a mesh."""

    device_coord: MeshCoordinate
    core_coord: CoreCoord


@dataclass
class SocketConnection:
    """From a core of the sender to one of the receiver."""

    sender_core: MeshCoreCoord
    receiver_core: MeshCoreCoord


@dataclass
class SocketMemoryConfig:
    """Where a receiver keeps what has arrived, and how much of it."""

    socket_storage_type: BufferType
    fifo_size: int
    sender_sub_device: SubDeviceId | None = None
    receiver_sub_device: SubDeviceId | None = None
    per_core_allocation: bool = False

    def __post_init__(self) -> None:
        if self.fifo_size < 1:
            raise ArgumentError(f"fifo_size={self.fifo_size}", fix="give the bytes of the queue")


@dataclass
class SocketConfig:
    """All connections of a socket."""

    connections: Sequence[SocketConnection]
    memory_config: SocketMemoryConfig
    sender_rank: int | None = None
    receiver_rank: int | None = None
    sender_mesh_id: int | None = None
    receiver_mesh_id: int | None = None


class SocketEndpoint(Choice):
    """The two ends."""

    SENDER, RECEIVER = 0, 1


@dataclass
class _Sent:
    """The parts of one tensor, by connection."""

    parts: list[Block]
    dtype: DataType
    where: str
    topology: TensorTopology | None = None  # None if another process sent them


class MeshSocket:
    """One end of a socket."""

    def __init__(self, device: MeshDevice, config: SocketConfig) -> None:
        if device.runtime.mesh.is_split:
            raise UnsupportedError(
                f"a socket on {device}, which several processes split, is not supported",
                fix="give every process a mesh of its own (TT_MESH_ID), or use ttnn.point_to_point",
            )
        self._device, self._config = device, config
        apart = config.sender_rank is not None or config.receiver_rank is not None
        self._peer: int | None = None  # the rank of the other end, if that is in another process
        self._endpoint = SocketEndpoint.SENDER
        if apart:
            self._endpoint, self._peer = _apart(config)
        self._waiting: deque[_Sent] = deque()
        memory = config.memory_config
        self._room = room_on(device, memory.socket_storage_type, memory.fifo_size, "socket")

    def get_mesh_device(self) -> MeshDevice:
        return self._device

    def get_connection_config(self) -> list[SocketConnection]:
        return list(self._config.connections)

    def get_socket_endpoint_type(self) -> SocketEndpoint:
        return self._endpoint

    def get_active_cores(self) -> list[MeshCoreCoord]:
        sends = self._endpoint is SocketEndpoint.SENDER
        return [each.sender_core if sends else each.receiver_core for each in self._config.connections]

    def get_config_buffer_address(self) -> int:
        """Where its queue is, on all devices."""
        return self._room.region.address

    def get_fabric_node_id(self, endpoint: SocketEndpoint, coord: Sequence[int]) -> FabricNodeId:
        """A device of this end as the fabric knows it."""
        if endpoint is not self._endpoint:
            raise OperandError(f"this is the end {self._endpoint}", fix="ask the other end")
        return self._device.get_fabric_node_id(coord)

    def __repr__(self) -> str:
        return f"MeshSocket({self._endpoint.name} on {self._device}, {len(self._config.connections)} connections)"


def _apart(config: SocketConfig) -> tuple[SocketEndpoint, int]:
    """Which end this process is, and the rank of the other."""
    processes.init_distributed_context()
    here, ends = int(processes.distributed_context_get_rank()), (config.sender_rank, config.receiver_rank)
    if here not in ends or None in ends or ends[0] == ends[1]:
        raise OperandError(
            f"rank {here} is not one of two ends of a socket from rank {ends[0]} to rank {ends[1]}",
            fix="ttnn.create_socket_pair for both ends in one process",
        )
    number = ends.index(here)
    return SocketEndpoint(number), int(ends[1 - number])  # type: ignore[arg-type]


def create_socket_pair(
    sender_mesh_device: MeshDevice, receiver_mesh_device: MeshDevice, socket_config: SocketConfig
) -> tuple[MeshSocket, MeshSocket]:
    """The two ends of a socket."""
    for connection in socket_config.connections:
        sender_mesh_device.get_device_id(connection.sender_core.device_coord)  # an error if it is not there
        receiver_mesh_device.get_device_id(connection.receiver_core.device_coord)
    here = replace(socket_config, sender_rank=None, receiver_rank=None)
    sender, receiver = MeshSocket(sender_mesh_device, here), MeshSocket(receiver_mesh_device, here)
    receiver._endpoint, receiver._waiting = SocketEndpoint.RECEIVER, sender._waiting
    return sender, receiver


def _pairs(socket: MeshSocket) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Sending and receiving device of every connection; several cores of one device carry one part."""
    ends = [
        (tuple(c.sender_core.device_coord), tuple(c.receiver_core.device_coord)) for c in socket._config.connections
    ]
    return list(dict.fromkeys(ends))


def _check_end(name: str, tensor: Tensor, socket: MeshSocket, endpoint: SocketEndpoint) -> None:
    device, _ = operands(name, tensor)
    if not isinstance(socket, MeshSocket):
        raise ArgumentError(f"ttnn.{name}: {socket!r} is not a ttnn.MeshSocket", fix="ttnn.create_socket_pair(...)")
    if socket._endpoint is not endpoint:
        raise OperandError(f"ttnn.{name}: this is the end {socket._endpoint} of the socket", fix="take the other end")
    if device is not socket._device:
        raise OperandError(f"ttnn.{name}: the tensor is on {device}, the socket on {socket._device}")


@op("experimental.send_async", "experimental.send_direct_async")
def send_async(input_tensor, mesh_socket) -> list[Tensor]:
    """Send what the sending devices of a socket hold."""
    _check_end("experimental.send_async", input_tensor, mesh_socket, SocketEndpoint.SENDER)
    parts = [part(input_tensor.block, source).clone() for source, _ in _pairs(mesh_socket)]
    if mesh_socket._peer is None:
        mesh_socket._waiting.append(_Sent(parts, input_tensor.dtype, where(), input_tensor.tensor_topology()))
    else:
        for each in parts:
            processes.send(each, mesh_socket._peer)
    return []


@op("experimental.recv_async", "experimental.recv_direct_async")
def recv_async(output_tensor, mesh_socket) -> list[Tensor]:
    """Receive what was sent first into a tensor, at the receiving devices of a socket."""
    name = "experimental.recv_async"
    _check_end(name, output_tensor, mesh_socket, SocketEndpoint.RECEIVER)
    if mesh_socket._peer is not None:
        mesh_socket._waiting.append(_receive(output_tensor, mesh_socket, mesh_socket._peer))
    if not mesh_socket._waiting:
        raise OperandError(
            f"ttnn.{name}: nothing has been sent",
            fix="ttnn.experimental.send_async before, in the order of the program",
        )
    sent = mesh_socket._waiting[0]
    if sent.dtype is not output_tensor.dtype or sent.parts[0].shape != tuple(output_tensor.shape):
        raise OperandError(
            f"ttnn.{name}: {output_tensor.dtype} {list(output_tensor.shape)} cannot receive {sent.dtype} "
            f"{list(sent.parts[0].shape)}",
            sent=sent.where,
        )
    mesh_socket._waiting.popleft()
    queues.used(mesh_socket._device, name, writes=(output_tensor,))
    values = output_tensor.block.expand(*output_tensor.grid, *output_tensor.shape).clone()
    for (_, target), arrived in zip(_pairs(mesh_socket), sent.parts, strict=True):
        values[target] = arrived
    output_tensor.write(values)
    output_tensor.update_tensor_topology(_label(name, output_tensor, mesh_socket, sent))
    return [output_tensor]


def _label(name: str, output: Tensor, socket: MeshSocket, sent: _Sent) -> TensorTopology:
    """The sender's label if every device got what the one at its coordinate had; else none says what is the same."""
    if output._coords is not None:  # some devices have none of it: nobody takes it for the same on all
        return output.tensor_topology()
    pairs, group = _pairs(socket), GroupCall(name, output)
    places = [tuple(each) for each in group.mesh.coordinates()]
    straight = sorted(pairs) == [(place, place) for place in places]
    if straight and sent.topology is not None and [*map(tuple, sent.topology.mesh_coords())] == places:
        return sent.topology
    return group.apart(group.axes)


def _receive(like: Tensor, socket: MeshSocket, peer: int) -> _Sent:
    """What another process sent, which has to be of the shape and dtype of what it goes into."""
    parts = [torch.empty(tuple(like.shape), dtype=like.block.dtype) for _ in _pairs(socket)]
    for each in parts:
        processes.receive(each, peer)
    return _Sent(parts, like.dtype, where())
