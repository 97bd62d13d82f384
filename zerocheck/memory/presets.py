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
        """Return the number of parameters (Psi). Imports torch."""
        from .transformer import build

        return sum(parameter.numel() for parameter in build(self).parameters())

    def with_blocks(self, blocks: int) -> Architecture:
        """Return this architecture with another number of blocks."""
        return replace(self, blocks=blocks, published=None)


def _gpt(blocks: int, width: int, heads: int, source: str, **more: int) -> Architecture:
    sizes = {"key_value_heads": heads, "hidden": 4 * width, "positions": 1024, **more}
    return Architecture(
        family="gpt",
        blocks=blocks,
        width=width,
        heads=heads,
        vocabulary=50257,
        tied=True,
        source=source,
        **sizes,  # type: ignore[arg-type]
    )


_LLAMA_SIZES = (
    "blocks",
    "width",
    "heads",
    "key_value_heads",
    "hidden",
    "vocabulary",
    "positions",
    "published",
)


def _llama(source: str, *sizes: int, **more: int) -> Architecture:
    named = dict(zip(_LLAMA_SIZES, sizes, strict=True))
    return Architecture(family="llama", source=source, **named, **more)  # type: ignore[arg-type]


_GPT2, _GPT3, _ZERO = "Radford et al. 2019", "Brown et al. 2020", "Rajbhandari et al. 2020"
_LLAMA, _LLAMA3 = "Touvron et al. 2023", "Grattafiori et al. 2024"
_MIXTRAL = "Jiang et al. 2024"

_LLAMA3_8B = _llama(_LLAMA3, 32, 4096, 32, 8, 14336, 128256, 8192, 8_030_261_248)

PRESETS: dict[str, Architecture] = {
    "gpt2": _gpt(12, 768, 12, _GPT2, published=124_439_808),
    "gpt2-medium": _gpt(24, 1024, 16, _GPT2, published=354_823_168),
    "gpt2-large": _gpt(36, 1280, 20, _GPT2, published=774_030_080),
    "gpt2-xl": _gpt(48, 1600, 25, _GPT2, published=1_557_611_200),
    "gpt3-175b": _gpt(96, 12288, 96, _GPT3, positions=2048),
    "zero-7.5b": _gpt(36, 4096, 32, _ZERO),
    "llama-7b": _llama(_LLAMA, 32, 4096, 32, 32, 11008, 32000, 2048, 6_738_415_616),
    "llama-13b": _llama(_LLAMA, 40, 5120, 40, 40, 13824, 32000, 2048, 13_015_864_320),
    "llama-8b": _LLAMA3_8B,
    "llama3-8b": _LLAMA3_8B,
    "llama-70b": _llama(_LLAMA3, 80, 8192, 64, 8, 28672, 128256, 8192, 70_553_706_496),
    "llama-405b": _llama(_LLAMA3, 126, 16384, 128, 8, 53248, 128256, 8192, 405_853_388_800),
    "mixtral-8x7b": _llama(
        _MIXTRAL, 32, 4096, 32, 8, 14336, 32000, 32768, 46_702_792_704, experts=8, active_experts=2
    ),
}
"""Names that `zerocheck memory` takes."""

COUNTED: dict[str, int] = {"7.5B": 7_500_000_000, "128B": 128_000_000_000, "1T": 1_000_000_000_000}
"""The models of the paper's Table 1, by their number of elements alone."""
