"""What is timed: sizes of published models, a few odd ones, and the order that a short run takes."""

import dataclasses

from . import formats

TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
# The cells that tell most come first, since time may run out.
TOKENS_BY_WEIGHT = (1024, 16384, 64, 1, 4096, 256, 16)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    format: str  # a name of formats.FORMATS
    gpt_oss: bool = False  # biases of both products and the clamped SwiGLU

    def __post_init__(self):
        group = self.weight_format.group[1]
        if self.hidden % group or self.inner % group:
            raise ValueError(f"{self.name}: {self.format} needs multiples of {group}, found H {self.hidden} and I {self.inner}")

    @property
    def weight_format(self) -> formats.Format:
        return formats.find(self.format)

    def flops(self, tokens: int) -> int:
        return 6 * tokens * self.top_k * self.hidden * self.inner


_SIZES = {
    "qwen3-30b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "qwen3-235b": (128, 8, 4096, 1536),
    "olmoe": (64, 8, 2048, 1024),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "dsv3-ep8": (32, 1, 7168, 2048),
    "deepseek-v3": (256, 8, 7168, 2048),
    "deepseek-v2": (160, 6, 5120, 1536),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "kimi-k2": (384, 8, 7168, 2048),
    "granite-3b": (40, 8, 1536, 512),
    "qwen1.5-moe": (60, 4, 2048, 1408),
}
# The odd sizes are run in 16 bits alone, the largest in four.
_SIZES_OF_FORMAT = {
    "bf16": tuple(size for size in _SIZES if size not in ("gpt-oss-120b", "kimi-k2")),
    "e4m3": ("qwen3-30b", "mixtral-8x7b", "qwen3-235b", "olmoe", "dsv3-ep8", "deepseek-v3", "deepseek-v2"),
    "int4": ("qwen3-30b", "mixtral-8x7b", "qwen3-235b", "dsv3-ep8", "deepseek-v3", "kimi-k2"),
    "mxfp4": ("qwen3-30b", "mixtral-8x7b", "qwen3-235b", "gpt-oss-20b", "dsv3-ep8", "deepseek-v3", "kimi-k2"),
    "mxfp4_fp8": ("qwen3-30b", "mixtral-8x7b", "qwen3-235b", "gpt-oss-20b", "dsv3-ep8", "deepseek-v3"),
    "mxfp4_fp8_group": ("qwen3-30b", "mixtral-8x7b", "qwen3-235b", "gpt-oss-20b", "dsv3-ep8", "deepseek-v3"),
    "nvfp4": ("qwen3-30b", "mixtral-8x7b", "qwen3-235b", "gpt-oss-20b", "dsv3-ep8", "deepseek-v3", "kimi-k2"),
}
# These have their biases, as published; those of the table above leave them out.
_GPT_OSS = ("gpt-oss-20b", "gpt-oss-120b")


def _cases():
    for form, sizes in _SIZES_OF_FORMAT.items():
        for size in sizes:
            yield Case(size + formats.find(form).suffix, *_SIZES[size], form)
    for size in _GPT_OSS:
        for form in ("mxfp4", "mxfp4_fp8", "mxfp4_fp8_group"):
            yield Case(size + "-biases" + formats.find(form).suffix, *_SIZES[size], form, gpt_oss=True)


CASES = {case.name: case for case in _cases()}
# The README's layers first.
DEFAULT_CASES = (
    "qwen3-30b", "qwen3-235b-fp8", "mixtral-8x7b", "deepseek-v3-fp8", "qwen3-30b-fp8", "qwen3-235b",
    "mixtral-8x7b-fp8", "gpt-oss-20b", "olmoe", "dsv3-ep8-fp8", "dsv3-ep8",
)


def parse_case(text: str) -> Case:
    """A case by name, or ExkxHxI[:format] for sizes of one's own: 48x6x1792x640:e4m3."""
    if text in CASES:
        return CASES[text]
    sizes, _, form = text.partition(":")
    numbers = sizes.split("x")
    if len(numbers) != 4 or not all(n.isdigit() and int(n) > 0 for n in numbers):
        raise ValueError(f"unknown case {text!r}: expected one of {', '.join(CASES)}, or ExkxHxI[:format]")
    return Case(text, *map(int, numbers), form or "bf16")


def routings_per_graph(tokens: int) -> int:
    """So many that a replay reads more than four times the L2 cache."""
    return 8 if tokens <= 64 else 3 if tokens <= 1024 else 1


def cells_in_order(cases: list, tokens: list) -> list:
    """(case, its tokens in order of weight). Weights are made once a case, so cases are not interleaved."""
    ranked = [t for t in TOKENS_BY_WEIGHT if t in tokens]
    return [(case, ranked + [t for t in tokens if t not in ranked]) for case in cases]
