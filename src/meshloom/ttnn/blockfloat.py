"""Block floats: 16 neighbours of a row share one exponent; each keeps a sign and a few bits of mantissa."""

from __future__ import annotations

import torch

BLOCK = 16


def rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Float32 values as block floats with `bits` of mantissa (7 or 3) can say them, 16 along the last dim a block.

    >>> rounded(torch.tensor([255.0, 1.0, -0.0]), 7)
    tensor([254.,   0.,   0.])
    """
    data = values.float().contiguous()
    width = data.shape[-1] if data.dim() else 1
    padded = torch.nn.functional.pad(data.reshape(-1, width), [0, -width % BLOCK]).view(torch.int32)
    blocks = padded.reshape(padded.shape[0], -1, BLOCK)
    exponent = blocks >> 23 & 0xFF
    shared = exponent.amax(-1, keepdim=True)
    significand = torch.where(exponent == 0, 0, blocks & 0x7FFFFF | 0x800000) >> (shared - exponent).clamp(max=31)
    drop = 24 - bits
    odd = significand >> drop & 1
    kept = ((significand + (1 << drop - 1) - 1 + odd) >> drop).clamp(max=(1 << bits) - 1)
    scale = torch.ldexp(torch.ones((), dtype=torch.float64), (shared - 127 - (bits - 1)).double())
    result = (kept.double() * scale).float()
    result = torch.where(blocks < 0, -result, result)
    special = shared == 255
    result = torch.where(special, torch.where(exponent == 255, blocks.view(torch.float32), 0.0), result)
    result = torch.where(result == 0, torch.zeros_like(result), result)
    return result.reshape(padded.shape)[:, :width].reshape(data.shape)
