"""What a kernel on blocks takes on the machine that runs it: its kind by name, then the host's curve for that kind.

`Work` is a kernel without torch: its name, the bytes that it touches, and, of a product, its sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshloom.fabric.host import Host, weigh_neighbours


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel: torch's name of it, the bytes that it reads and writes, and what else its time depends on."""

    name: str
    bytes: float
    dtype: str = "f32"
    product: tuple[int, int, int, int] | None = None  # batch, m, k, n
    flops: float = 0.0
    items: int = 0  # tensors of a list
    fresh: int = 0  # bytes of results so large that their memory comes from the system
    rows: int = 0  # of a reduction that adds rows to rows: how many become one
    order: str = ""  # "strided" if it reads memory in runs, "turned" if in single elements
    is_across: bool = False  # a softmax over another dim than the last
    is_view: bool = False


FRESH = 32 << 20  # bytes from which the C library takes memory from the system, and gives it back, every time

# fmt: off
KINDS = {
    "softmax": "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data",
    "norm": "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
            "native_batch_norm native_batch_norm_backward _fused_rms_norm _fused_rms_norm_backward",
    "sum": "sum mean amax amin prod var std linalg_vector_norm logsumexp any all max min argmax",
    "copy": "clone copy copy_ _to_copy cat stack fill fill_ zero_ zeros zeros_like ones ones_like full full_like "
            "constant_pad_nd new_zeros new_full scalar_tensor arange",
    "look-up": "embedding index_select gather index embedding_dense_backward scatter scatter_add index_add index_put "
               "nll_loss_forward nll_loss_backward slice_backward select_backward index_put_ _index_put_impl_",
    "attention": "_scaled_dot_product_flash_attention_for_cpu",
    "attention backward": "_scaled_dot_product_flash_attention_for_cpu_backward",
}
# fmt: on
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}
ROWS = (2, 8, 32, 256, 2048)  # rows that one sum adds up, each with a curve


def kind_of(work: Work) -> str:
    """The curve that a kernel goes by; what is not known goes by element.

    >>> kind_of(Work("tanh", 8.0)), kind_of(Work("add_", 8.0)), kind_of(Work("sum", 8.0, rows=8))
    ('pointwise', 'in place', 'sum of rows')
    """
    kind = _KIND_OF.get(work.name)
    if kind is None:
        return "in place" if work.name.endswith("_") else "strided" if work.order else "pointwise"
    if kind == "sum" and work.rows:
        return "sum of rows"
    if kind == "softmax" and work.is_across:
        return "softmax across"
    return f"{work.order} copy" if kind == "copy" and work.order else kind


def kernel_seconds(work: Work, host: Host) -> float:
    """What a kernel takes; a view nothing.

    >>> from meshloom.fabric.host import Curve, Products
    >>> curve, rates = Curve(((1000.0, 1e-6),)), {(16, 16, 16): 1e9, (32, 32, 32): 1e9}
    >>> products, calls = {"f32": Products((16,), rates)}, {"item": 1e-6, "fresh": 1e-9}
    >>> host = Host("here", 1, {"pointwise": curve}, products, calls, {"tanh": 5.0})
    >>> kernel_seconds(Work("tanh", 3000.0), host)  # starting one, and five times what its bytes take beyond that
    1.1000000000000003e-05
    >>> kernel_seconds(Work("add", 3000.0), host)
    3e-06
    """
    if work.is_view:
        return 0.0
    return _seconds(work, host) + work.fresh * host.calls["fresh"]


def _seconds(work: Work, host: Host) -> float:
    if work.product is not None:
        batch, m, k, n = work.product
        table = host.products.get(work.dtype) or next(iter(host.products.values()))
        return max(host.curve("pointwise").points[0][1], table.seconds(batch, (m, k, n)))
    kind = kind_of(work)
    if kind == "sum of rows":
        return _sum_of_rows(work, host)
    curve = host.curve(kind)
    seconds = curve.seconds(work.flops if kind.startswith("attention") else work.bytes)
    start = min(seconds, curve.points[0][1])
    return start + host.weights.get(work.name, 1.0) * (seconds - start) + work.items * host.calls["item"]


def _sum_of_rows(work: Work, host: Host) -> float:
    """Between the curves of the two numbers of rows around it, by how near each is."""
    curves = [(host.curve(f"sum of {rows} rows"), part) for rows, part in weigh_neighbours(ROWS, work.rows)]
    return math.exp(sum(part * math.log(curve.seconds(work.bytes)) for curve, part in curves))
