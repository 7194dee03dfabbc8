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
    run: int = 0  # elements that lie in a row, of the operand with the shortest runs; 0 if all lie in order
    is_turned: bool = False  # elements that follow each other lie in different lines of the cache
    attention: tuple[int, int] = (0, 0)  # tokens, and the width of a head
    is_transposed: bool = False  # a product whose first operand is
    is_across: bool = False  # a softmax over another dim than the last
    is_even: bool = False  # one whose neighbours lie so many bytes apart that few lines of the cache can hold them
    is_view: bool = False


FRESH = 32 << 20  # bytes from which the C library takes memory from the system, and gives it back, every time

# fmt: off
KINDS = {
    "softmax": "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data",
    "norm": "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
            "native_batch_norm native_batch_norm_backward _fused_rms_norm _fused_rms_norm_backward",
    "sum": "sum mean amax amin prod var std linalg_vector_norm logsumexp any all max min argmax",
    "copy": "clone copy copy_ _to_copy fill fill_ zero_ zeros zeros_like ones ones_like full full_like "
            "constant_pad_nd new_zeros new_full scalar_tensor arange",
    "join": "cat stack",
    "look-up": "embedding index_select gather index embedding_dense_backward scatter scatter_add index_add index_put "
               "nll_loss_forward nll_loss_backward slice_backward select_backward index_put_ _index_put_impl_",
    "attention": "_scaled_dot_product_flash_attention_for_cpu",
    "attention backward": "_scaled_dot_product_flash_attention_for_cpu_backward",
}
# fmt: on
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}
ROWS = (2, 8, 32, 256, 2048)  # rows that one sum adds up, each with a curve
RUNS = (1, 2, 6, 20, 64)  # elements in a row, each with a curve
WEIGHED = 4 << 20  # bytes at which single kernels are weighed
ALIGNED = 16  # elements in a line of the cache: rows of other lengths begin within one
RAGGED = 64  # sizes from which arithmetic and not memory decides what a product takes
EVEN = 2048  # bytes: neighbours that lie a multiple of it apart share few places in a cache
VECTOR = 32  # elements in a row from which torch's loops use vectors
TOKENS, WIDTHS = (12, 40, 144, 512), (20, 64)  # of attention


def kind_of(work: Work) -> str:
    """The curve that a kernel goes by; what is not known goes by element.

    >>> kind_of(Work("tanh", 8.0)), kind_of(Work("add_", 8.0)), kind_of(Work("sum", 8.0, rows=8))
    ('pointwise', 'in place', 'sum of rows')
    """
    kind = _KIND_OF.get(work.name)
    if kind is None:
        return "in place" if work.name.endswith("_") else "strided" if work.run else "pointwise"
    if kind == "sum" and work.rows:
        return "sum of rows"
    if kind == "softmax" and work.is_across:
        return "softmax across"
    if kind == "copy" and work.run:
        return "turned copy" if work.is_turned else "strided copy"
    return kind


def kernel_seconds(work: Work, host: Host) -> float:
    """What a kernel takes; a view nothing.

    >>> from meshloom.fabric.host import Curve, Products
    >>> curve, rates = Curve(((1000.0, 1e-6),)), {(16, 16, 16): 1e9, (32, 32, 32): 1e9}
    >>> products, calls = {"f32": Products((16,), rates)}, {"item": 1e-6, "fresh": 1e-9}
    >>> host = Host("here", 1, {"pointwise": curve}, products, calls, {"tanh": 5.0})
    >>> f"{kernel_seconds(Work('tanh', 3000.0), host):.2e}"  # starting one, and five times what its bytes take
    '1.60e-05'
    >>> kernel_seconds(Work("add", 3000.0), host)
    3e-06
    """
    if work.is_view:
        return 0.0
    return _seconds(work, host) + _beyond(work, host) + work.fresh * host.calls["fresh"]


def _beyond(work: Work, host: Host) -> float:
    """What more bytes than a curve has points for cost beyond their proportion: sums are measured at more of them."""
    if work.product is not None or work.attention[0]:
        return 0.0
    kind = kind_of(work)
    names = [name for name in host.curves if name.startswith(kind)] if kind != "sum of rows" else []
    last = max((host.curves[name].points[-1][0] for name in names), default=work.bytes)
    return cold_seconds(work.bytes, work.bytes, last, host) if work.bytes > last and "sum" in host.curves else 0.0


def _seconds(work: Work, host: Host) -> float:
    if work.product is not None:
        batch, m, k, n = work.product
        table = host.products.get(work.dtype) or next(iter(host.products.values()))
        seconds = table.seconds(batch, (m, k, n)) * (host.weights.get("transposed", 1.0) if work.is_transposed else 1.0)
        is_ragged = min(m, k, n) >= RAGGED and (m % ALIGNED or n % ALIGNED)
        seconds *= host.weights.get("ragged", 1.0) if is_ragged else 1.0
        return max(host.curve("pointwise").points[0][1], seconds)
    kind = kind_of(work)
    seconds, start = (_by_curves(work, host, kind, size) for size in (_size_of(work), 1.0))
    start = min(seconds, start)
    slow = kind == "strided" and work.run < VECTOR
    weight = host.weights.get(f"{work.name} by element" if slow else work.name, 1.0)
    seconds = start + _weigh(weight, seconds - start, work, host, kind)
    seconds *= host.weights.get("even", 1.0) if work.is_even else 1.0
    return seconds + work.items * host.calls["item"]


def _weigh(weight: float, seconds: float, work: Work, host: Host, kind: str) -> float:
    """What a kernel takes that was seen to take so many times as long as its kind at one size.

    One that weighs more is bound by its arithmetic, which takes as long per element at any size, until memory is
    slower than that. One that weighs less saves no more where memory is slower than at that size.
    """
    beyond = max(_by_curves(work, host, kind, WEIGHED) - _by_curves(work, host, kind, 1.0), 0.0)
    if weight <= 1.0:
        return seconds - (1 - weight) * min(seconds, beyond)
    return max(seconds, weight * beyond / WEIGHED * work.bytes)


def _size_of(work: Work) -> float:
    return work.flops if work.attention[0] else work.bytes


def _by_curves(work: Work, host: Host, kind: str, size: float) -> float:
    """What a size takes: on the curve of a kind, or between those of the neighbours, by how near each is."""
    if kind == "sum of rows":
        curves = [(f"sum of {rows} rows", part) for rows, part in weigh_neighbours(ROWS, work.rows)]
    elif kind in ("strided", "strided copy", "join"):
        curves = [(f"{kind} {run}", part) for run, part in weigh_neighbours(RUNS, work.run or RUNS[-1])]
    elif kind.startswith("attention"):
        sides = weigh_neighbours(TOKENS, work.attention[0]), weigh_neighbours(WIDTHS, work.attention[1])
        curves = [(f"{kind} {tokens}x{width}", one * other) for tokens, one in sides[0] for width, other in sides[1]]
    else:
        return host.curve(kind).seconds(size)
    return math.exp(sum(part * math.log(host.curve(name).seconds(size)) for name, part in curves if part))


def cold_seconds(size: float, since: float, own: float, host: Host) -> float:
    """What an operand of some bytes costs beyond its kernel's curve, if so many bytes were touched since its last use.

    The curves are measured on operands that were used just before. The further away a use is, the slower the memory
    that the operand is found in: it is read at the rate at which so many bytes are summed up.

    >>> from meshloom.fabric.host import Curve
    >>> host = Host("here", 1, {"sum": Curve(((1000.0, 1e-6), (4000.0, 8e-6)))}, {}, {})
    >>> cold_seconds(500.0, 1000.0, 1000.0, host), f"{cold_seconds(500.0, 4000.0, 1000.0, host) * 1e6:.2f} us"
    (0.0, '0.50 us')
    """
    if not size:
        return 0.0
    curve = host.curve("sum")
    rates = [curve.seconds(each) / each for each in (max(since, own), max(own, curve.points[0][0]))]
    return max(0.0, size * (rates[0] - rates[1]))
