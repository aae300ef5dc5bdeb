"""e4m3 with a float32 scale for each block of 128 x 128; rows are quantised too, by groups of 128 of a row."""

import torch

from . import FORMATS

DTYPE = torch.float32
GROUP = FORMATS["e4m3"].group[1]
MOST = 448.0


def encode(matrix: torch.Tensor) -> tuple:
    """[R, C] -> e4m3 [R, C], float32 [R / 128, C / 128], rounded up."""
    rows, cols = matrix.shape
    padded = torch.nn.functional.pad(matrix.float(), (0, -cols % GROUP, 0, -rows % GROUP))
    blocks = padded.view(padded.shape[0] // GROUP, GROUP, padded.shape[1] // GROUP, GROUP)
    scales = (blocks.abs().amax((1, 3)) / MOST).clamp_min(1e-12)
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:rows, :cols].contiguous(), scales


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = scales.double().repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return codes.double() * wide[: codes.shape[0], : codes.shape[1]]


def quantise_rows(rows: torch.Tensor) -> tuple:
    """[M, C] -> e4m3 [M, C], a float32 scale for each group of 128 of a row, whose last may be shorter."""
    count, columns = rows.shape
    groups = torch.nn.functional.pad(rows.float(), (0, -columns % GROUP)).view(count, -1, GROUP)
    scales = (groups.abs().amax(-1) / MOST).clamp_min(1e-12)
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn).view(count, -1)
    return codes[:, :columns].contiguous(), scales


def rows_as_read(rows: torch.Tensor) -> torch.Tensor:
    codes, scales = quantise_rows(rows)
    return codes.double() * scales.double().repeat_interleave(GROUP, 1)[:, : rows.shape[1]]
