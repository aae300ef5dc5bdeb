"""MXFP4 weights beside rows of e4m3, which have a float32 scale for each group of 128 columns."""

from .e4m3 import rows_as_read
from .mxfp4 import DTYPE, GROUP, decode, encode

__all__ = ["DTYPE", "GROUP", "decode", "encode", "rows_as_read"]
