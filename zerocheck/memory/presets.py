"""Shapes and parameter counts of known models, as data. Imports no torch.

Shapes: GPT-2 from Radford et al. 2019 (Table 2; the sizes are those of the published weights, with
tied embeddings), GPT-3 from Brown et al. 2020 (Table 2.1), Llama 7B and 13B from Touvron et al.
2023 (Table 2), Llama 8B, 70B and 405B from Grattafiori et al. 2024 (Table 3) with the intermediate
sizes of the published weights, Mixtral 8x7B from Jiang et al. 2024 (Table 1). Rajbhandari et al.
2020 give their 7.5B by its number of parameters only: the shape of `zero-7.5b` is ours, the nearest
of width 4096.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The shape of a decoder-only transformer; sizes in elements.

    family: gpt (LayerNorm and biases, learned positions, GELU) or llama (RMSNorm, no biases, rotary
    positions, SiLU gate); width: of the residual stream; hidden: of the MLP; heads of the queries,
    key_value_heads of keys and values (fewer: grouped-query attention); positions: longest sequence
    of learned positions, the default of `--sequence` for all; tied: the head's weight is the
    embedding's; head_size: elements of a head, where it is not width / heads; query_bias: queries,
    keys and values have biases; experts: MLPs of each block, all of them held, of which each token
    takes active_experts; 0 is one MLP without a router; published: parameters as published, or
    None.
    """

    family: Literal["gpt", "llama"]
    blocks: int
    width: int
    heads: int
    key_value_heads: int
    hidden: int
    vocabulary: int
    positions: int
    tied: bool = False
    head_size: int | None = None
    query_bias: bool = False
    experts: int = 0
    active_experts: int = 0
    published: int | None = None
    source: str = ""

    @property
    def head_width(self) -> int:
        """Elements of one head."""
        return self.head_size or self.width // self.heads

    def elements(self) -> int:
        """Return the number of parameters (Psi), counted from the shape."""
        outside = self.vocabulary * self.width * (1 if self.tied else 2)
        if self.family == "gpt":
            outside += self.positions * self.width + 2 * self.width
            return outside + self.blocks * _gpt_block(self)
        return outside + self.width + self.blocks * _llama_block(self)

    def with_blocks(self, blocks: int) -> Architecture:
        """Return this architecture with another number of blocks."""
        return replace(self, blocks=blocks, published=None)


def _gpt_block(shape: Architecture) -> int:
    width, hidden = shape.width, shape.hidden
    attention = 4 * width * width + 4 * width
    return attention + 2 * width * hidden + hidden + width + 4 * width


def _llama_block(shape: Architecture) -> int:
    width = shape.width
    wide, narrow = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
    attention = 2 * width * wide + 2 * width * narrow
    if shape.query_bias:
        attention += wide + 2 * narrow
    mlps = 3 * width * shape.hidden * max(shape.experts, 1)
    return attention + mlps + width * shape.experts + 2 * width


def _gpt_shape(
    blocks: int,
    width: int,
    heads: int,
    *,
    positions: int = 1024,
    published: int | None = None,
    source: str = "",
) -> Architecture:
    return Architecture(
        family="gpt", blocks=blocks, width=width, heads=heads, key_value_heads=heads,
        hidden=4 * width, vocabulary=50257, positions=positions, tied=True, published=published,
        source=source,
    )  # fmt: skip


def _llama_shape(
    blocks: int,
    width: int,
    heads: int,
    key_value_heads: int,
    hidden: int,
    vocabulary: int,
    positions: int,
    published: int,
    source: str,
) -> Architecture:
    return Architecture(
        family="llama", blocks=blocks, width=width, heads=heads, key_value_heads=key_value_heads,
        hidden=hidden, vocabulary=vocabulary, positions=positions, published=published,
        source=source,
    )  # fmt: skip


_GPT2, _GPT3, _ZERO = "Radford et al. 2019", "Brown et al. 2020", "Rajbhandari et al. 2020"
_LLAMA, _LLAMA3 = "Touvron et al. 2023", "Grattafiori et al. 2024"
_MIXTRAL = "Jiang et al. 2024"

_LLAMA3_8B = _llama_shape(
    32, 4096, 32, 8, 14336, 128256, 8192, 8_030_261_248, _LLAMA3
)  # fmt: skip

PRESETS: dict[str, Architecture] = {
    "gpt2": _gpt_shape(12, 768, 12, published=124_439_808, source=_GPT2),
    "gpt2-medium": _gpt_shape(24, 1024, 16, published=354_823_168, source=_GPT2),
    "gpt2-large": _gpt_shape(36, 1280, 20, published=774_030_080, source=_GPT2),
    "gpt2-xl": _gpt_shape(48, 1600, 25, published=1_557_611_200, source=_GPT2),
    "gpt3-175b": _gpt_shape(96, 12288, 96, positions=2048, source=_GPT3),
    "zero-7.5b": _gpt_shape(36, 4096, 32, source=_ZERO),
    "llama-7b": _llama_shape(
        32, 4096, 32, 32, 11008, 32000, 2048, 6_738_415_616, _LLAMA
    ),
    "llama-13b": _llama_shape(
        40, 5120, 40, 40, 13824, 32000, 2048, 13_015_864_320, _LLAMA
    ),
    "llama-8b": _LLAMA3_8B,
    "llama3-8b": _LLAMA3_8B,
    "llama-70b": _llama_shape(
        80, 8192, 64, 8, 28672, 128256, 8192, 70_553_706_496, _LLAMA3
    ),
    "llama-405b": _llama_shape(
        126, 16384, 128, 8, 53248, 128256, 8192, 405_853_388_800, _LLAMA3
    ),
    "mixtral-8x7b": replace(
        _llama_shape(32, 4096, 32, 8, 14336, 32000, 32768, 46_702_792_704, _MIXTRAL),
        experts=8, active_experts=2,
    ),
}  # fmt: skip
"""Names that `zerocheck memory` takes."""

COUNTED: dict[str, int] = {
    "7.5B": 7_500_000_000,
    "128B": 128_000_000_000,
    "1T": 1_000_000_000_000,
}
"""The models of the paper's Table 1, by their number of elements alone."""
