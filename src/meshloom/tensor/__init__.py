"""Global-view tensors: creation, dispatch, autograd. Start with `base.Tensor`, then `dispatch`."""

from meshloom.tensor import accounting as _accounting  # noqa: F401  listens for meshes with a memory limit
from meshloom.tensor.base import Tensor
from meshloom.tensor.parameter import Gradient, Parameter

__all__ = ["Gradient", "Parameter", "Tensor"]
