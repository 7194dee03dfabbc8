"""Global-view tensors: creation, dispatch, autograd. Start with `base.Tensor`, then `dispatch`."""

from meshloom.tensor import (
    methods as _methods,  # noqa: F401  attaches the ops to Tensor
    optimizer_steps as _steps,  # noqa: F401  lets optimizers step on arrays
)
from meshloom.tensor.base import Tensor
from meshloom.tensor.parameter import Parameter

__all__ = ["Parameter", "Tensor"]
