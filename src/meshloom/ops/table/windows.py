"""Ops that look through windows."""

from __future__ import annotations

from meshloom.ops import windows
from meshloom.ops.rule import Op

_CONV = "input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1"
_TRANSPOSED = "input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1"
_MAX = "input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False"
_MEAN = "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True"

WINDOWS: tuple[Op, ...] = (
    *(Op(f"conv{n}d", windows.conv, _CONV, "trimmed") for n in (1, 2, 3)),
    *(Op(f"conv_transpose{n}d", windows.conv_transpose, _TRANSPOSED, "trimmed") for n in (1, 2, 3)),
    # a window of zeros has maximum and mean zero
    *(Op(f"max_pool{n}d", windows.pool, _MAX) for n in (1, 2, 3)),
    Op("avg_pool1d", windows.pool, _MEAN),
    *(Op(f"avg_pool{n}d", windows.pool, f"{_MEAN}, divisor_override=None") for n in (2, 3)),
    *(Op(f"adaptive_avg_pool{n}d", windows.adaptive_pool, "input, output_size") for n in (1, 2, 3)),
    *(Op(f"adaptive_max_pool{n}d", windows.adaptive_pool, "input, output_size") for n in (1, 2, 3)),
    Op(
        "interpolate",
        windows.interpolate,
        "input, size=None, scale_factor=None, mode='nearest', align_corners=None, recompute_scale_factor=None, "
        "antialias=False",
    ),
)
