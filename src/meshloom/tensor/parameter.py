"""Parameters: tensors that modules register and optimizers update, marked as torch marks those of its kind."""

from __future__ import annotations

import torch

from meshloom.errors import ArgumentError
from meshloom.mesh import Mesh
from meshloom.mesh.mesh import Homes, _made
from meshloom.placement import Partial, Placements, Replicate, Shard, Topology, as_placements
from meshloom.tensor.base import Tensor, rebuild
from meshloom.tensor.clients import sent
from meshloom.tensor.creation import distribute
from meshloom.tensor.moving import redistribute
from meshloom.tensor.refusals import refuse_moved_parameter, refuse_parameter


class _ParameterMeta(type(torch.nn.Parameter)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor) and bool(instance._is_param)


class Parameter(Tensor, torch.nn.Parameter, metaclass=_ParameterMeta):
    """A trainable tensor on a mesh, for `torch.nn` modules and `torch.optim` optimizers.

    As with `torch.nn.Parameter` of any tensor that is not torch's own, what is made is a `Tensor` with a mark.

    >>> import meshloom as loom
    >>> mesh = loom.open_mesh((2, 2), axes=("dp", "tp"))
    >>> p = Parameter(torch.ones(4, 4), mesh, {"tp": loom.Shard(1)})
    >>> loss = (loom.ones(2, 4, mesh=mesh) @ p).sum()
    >>> loss.backward()
    >>> p.grad.to_torch()[0]
    tensor([2., 2., 2., 2.])
    >>> isinstance(p, Parameter), isinstance(p, torch.nn.Parameter), isinstance(p, loom.Tensor)
    (True, True, True)
    """

    @sent("loom:Parameter")
    def __new__(  # type: ignore[misc]
        cls,
        data: torch.Tensor,
        mesh: Mesh | None = None,
        placements: Placements | None = None,
        requires_grad: bool = True,
    ) -> Tensor:
        tensor = data
        if not isinstance(tensor, Tensor):
            if mesh is None:
                raise ArgumentError(
                    "a parameter needs a mesh", fix="loom.Parameter(loom.distribute(w, mesh, placements))"
                )
            tensor = distribute(tensor.detach(), mesh, placements if placements is not None else {})
        elif mesh is not None:
            refuse_moved_parameter(tensor.topology, mesh)
            if placements is not None:
                tensor = redistribute(tensor, as_placements(placements, mesh, tensor.ndim))
        refuse_parameter(tensor.topology, requires_grad)
        made = rebuild(tensor.topology, tensor._data, requires_grad)
        made._number = tensor._number
        return made


# plain values, so that `torch.load` reads tensors on a mesh as it reads dense ones
torch.serialization.add_safe_globals([Tensor, rebuild, Topology, Shard, Replicate, Partial, _made, Homes])
