"""Weight formats, one line each; the file of the same name makes codes and scales of a matrix and reads them.

Such a file has DTYPE, what random weights are drawn in; encode(matrix [R, C]) -> (codes, scales or None), and a factor
of all scales after them where the format has one; decode(codes, scales), with that factor, -> the matrix in float64; and
rows_as_read(rows), float64 rows as a product of the format reads them. This table does without torch, which the report and the command line have no need of.
"""

import dataclasses
import importlib


@dataclasses.dataclass(frozen=True)
class Format:
    name: str
    suffix: str  # ends the names of its cases
    code_bits: int
    scale_bits: int = 0
    group: tuple = (1, 1)  # so many rows and columns share a scale
    tflops: int = 989  # an H200 gives its products no more
    limit: float = 1e-2  # a kernel with a larger relative L2 error of a token computes something else

    @property
    def weight_bits(self) -> float:
        """Of one weight, its share of a scale included."""
        return self.code_bits + self.scale_bits / (self.group[0] * self.group[1])

    @property
    def codec(self):
        return importlib.import_module(f"{__name__}.{self.name}")


FORMATS = {
    row.name: row
    for row in (
        Format("bf16", "", code_bits=16),
        # A code of the intermediate may fall to the other side of a boundary, which is no fault.
        Format("e4m3", "-fp8", code_bits=8, scale_bits=32, group=(128, 128), tflops=1979, limit=5e-2),
        Format("int4", "-int4", code_bits=4, scale_bits=16, group=(1, 128), limit=1.5e-2),
        Format("mxfp4", "-mxfp4", code_bits=4, scale_bits=8, group=(1, 32), limit=1.5e-2),
        Format("mxfp4_fp8", "-mxfp4-fp8", code_bits=4, scale_bits=8, group=(1, 32), tflops=1979, limit=5e-2),
        Format("mxfp4_fp8_group", "-mxfp4-fp8-group", code_bits=4, scale_bits=8, group=(1, 32), tflops=1979, limit=5e-2),
        Format("nvfp4", "-nvfp4", code_bits=4, scale_bits=8, group=(1, 16), limit=1.5e-2),
    )
}


def find(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}: expected one of {', '.join(FORMATS)}")
    return FORMATS[name]
