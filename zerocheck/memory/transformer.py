"""The modules of the presets: decoder-only transformers as they are usually written in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .experts import MixtureOfExperts
from .presets import Architecture


class Attention(nn.Module):
    """Causal self-attention by torch's scaled_dot_product_attention.

    rotary: queries and keys are turned by their position; with fewer key-value heads several
    queries share one.
    """

    def __init__(self, shape: Architecture, *, bias: bool, rotary: bool) -> None:
        super().__init__()
        self.heads, self.narrow_heads = shape.heads, shape.key_value_heads
        self.head_width, self.rotary = shape.head_width, rotary
        wide, narrow = self.heads * self.head_width, self.narrow_heads * self.head_width
        self.query = nn.Linear(shape.width, wide, bias=bias or shape.query_bias)
        self.key = nn.Linear(shape.width, narrow, bias=bias or shape.query_bias)
        self.value = nn.Linear(shape.width, narrow, bias=bias or shape.query_bias)
        self.out = nn.Linear(wide, shape.width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, sequence, width) to the same shape."""
        sequence = x.shape[1]
        query, key = self._heads(self.query(x)), self._heads(self.key(x))
        value = self._heads(self.value(x))
        if self.rotary:
            cosine, sine = _angles(sequence, self.head_width, x)
            query, key = _turned(query, cosine, sine), _turned(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.heads != self.narrow_heads
        )
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Divide features into heads: all, or those that a rank of tensor parallelism has."""
        return x.view(x.shape[0], x.shape[1], -1, self.head_width).transpose(1, 2)


def _angles(sequence: int, width: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, (sequence, width) each, in the dtype that computes."""
    half = torch.arange(0, width, 2, device=like.device, dtype=torch.float32)
    frequencies = torch.outer(
        torch.arange(sequence, device=like.device, dtype=torch.float32),
        1.0 / 500_000 ** (half / width),
    )
    angles = torch.cat((frequencies, frequencies), -1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class TransformerMlp(nn.Module):
    """Up, GELU, down."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, sequence, width) to the same shape."""
        out: torch.Tensor = self.down(F.gelu(self.up(x)))
        return out


class GatedMlp(nn.Module):
    """Up, multiplied by the SiLU of a gate, down; no biases."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, sequence, width) to the same shape."""
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def _mlp(shape: Architecture) -> nn.Module:
    if shape.family == "gpt":
        return TransformerMlp(shape)
    if not shape.experts:
        return GatedMlp(shape)
    experts: list[nn.Module] = [GatedMlp(shape) for _ in range(shape.experts)]
    return MixtureOfExperts(shape.width, experts, shape.active_experts)


class TransformerBlock(nn.Module):
    """Attention and MLP, each after a norm and added to what came in."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        gpt = shape.family == "gpt"
        norm = nn.LayerNorm if gpt else nn.RMSNorm
        self.before_attention: nn.Module = norm(shape.width)
        self.attention = Attention(shape, bias=gpt, rotary=not gpt)
        self.before_mlp: nn.Module = norm(shape.width)
        self.mlp = _mlp(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, sequence, width) to the same shape."""
        x = x + self.attention(self.before_attention(x))
        out: torch.Tensor = x + self.mlp(self.before_mlp(x))
        return out


class Transformer(nn.Module):
    """Embedding, `blocks`, norm, head. No dropout."""

    pp_plan = ("embedding", "positions", "blocks", "norm", "head")

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        gpt = shape.family == "gpt"
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.positions, shape.width) if gpt else None
        self.blocks = nn.ModuleList(TransformerBlock(shape) for _ in range(shape.blocks))
        self.norm: nn.Module = (nn.LayerNorm if gpt else nn.RMSNorm)(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids (batch, sequence) -> (batch, sequence, vocabulary)."""
        x = self.embedding(tokens)
        if isinstance(self.positions, nn.Embedding):
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def build(shape: Architecture) -> Transformer:
    """Return the model on the meta device: shapes without memory."""
    with torch.device("meta"):
        return Transformer(shape)
