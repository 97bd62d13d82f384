"""Models that users might have, small enough to be run with data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """An MLP with a residual; `layer_idx` counts."""

    def __init__(self, width: int, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Blocks under a name of the user's own; 37 and 101 are multiples of no number of ranks."""

    def __init__(self, blocks: int, kind: type[Block] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 37)
        self.layers = nn.ModuleList(kind(37, index) for index in range(blocks))
        self.head = nn.Linear(37, 101)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Sharded(Net):
    """Says which layers tensor parallelism shards, as models of transformers do."""

    tp_plan = {  # noqa: RUF012
        "embedding": "embedding_rowwise",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "head": "colwise_gather_output",
    }


class Tied(Net):
    """The head's weight is the embedding's."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.head.weight = self.embedding.weight


class Uneven(Block):
    """Every second block keeps more for the backward, though it has the same parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer_idx % 2:
            x = x.exp().log()
        return super().forward(x)


def small() -> nn.Module:
    return Net(3)


def sharded() -> nn.Module:
    return Sharded(3)


def plain() -> nn.Module:
    return nn.Sequential(nn.Embedding(101, 37), nn.Linear(37, 101))


def tied() -> nn.Module:
    return Tied(3)


def deep() -> nn.Module:
    return Net(16)


def uneven() -> nn.Module:
    return Net(16, Uneven)


def wider_inside() -> nn.Module:
    model = Net(16)
    model.layers[9].up = nn.Linear(37, 148, bias=False)
    return model


def stepped() -> nn.Module:
    """Blocks of three sizes."""
    model = Net(3)
    for index, layer in enumerate(model.layers):
        layer.up = nn.Linear(37, 20 + index)
        layer.down = nn.Linear(20 + index, 37)
    return model


def images() -> nn.Module:
    return nn.Conv2d(3, 2, 3)


def fails() -> nn.Module:
    raise ValueError("no such weights")


def on_cpu() -> nn.Module:
    return nn.Linear(2, 2, device="cpu")


def no_module() -> str:
    return "a model"


number = 7


class Pictures(nn.Module):
    """Convolutions of pictures, scaled by a keyword of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3)
        self.layers = nn.ModuleList(nn.Conv2d(7, 7, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(7, 11)

    def forward(self, pictures: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.stem(pictures * scale[:, None, None, None])
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x.mean((2, 3)))


def _drawn(generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    inputs = {
        "pictures": torch.randn(5, 3, 12, 12, generator=generator),
        "scale": torch.rand(5, generator=generator),
    }
    return inputs, torch.randint(11, (5,), generator=generator)


def pictures() -> tuple[object, ...]:
    return Pictures(), _drawn, F.cross_entropy


class WithLoss(Net):
    """Returns its loss, as models of transformers do."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = super().forward(tokens)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def with_loss() -> tuple[object, ...]:
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(101, (3, 30), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return WithLoss(3), batch


def no_batch() -> tuple[object, ...]:
    def batch(generator: torch.Generator) -> torch.Tensor:
        raise FileNotFoundError("no pictures")

    return Pictures(), batch, F.cross_entropy


class Encoder(nn.Module):
    """A vision transformer: patches of 16 pixels, a class token, learned positions."""

    def __init__(self, blocks: int, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 197, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Residual(nn.Module):
    """Two convolutions with batch norm and a residual, halving the picture where it widens."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if stride == 2 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first_norm(self.first(x)).relu()
        return (self.second_norm(self.second(y)) + self.short(x)).relu()


class ResidualNetwork(nn.Module):
    """Of the shape of ResNet-18."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        self.blocks = nn.ModuleList(map(Residual, widths, widths[1:]))
        self.head = nn.Linear(512, 1000)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.norm(self.stem(pictures)).relu(), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def _photographs(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    pictures = torch.randn(16, 3, 224, 224, generator=generator)
    return pictures, torch.randint(1000, (16,), generator=generator)


def vision_transformer() -> tuple[object, ...]:
    return Encoder(4), _photographs, F.cross_entropy


def residual_network() -> tuple[object, ...]:
    return ResidualNetwork(), _photographs, F.cross_entropy


def own_count(model: nn.Module, case: object, mesh: object) -> object:
    """Build function that says itself how many microbatches a step has."""
    import zerocheck

    made: type[torch.optim.AdamW] = torch.optim.AdamW
    return zerocheck.Built(model, made(zerocheck.groups(model, case)))  # type: ignore[arg-type]


own_count.fixed = {"training": {"microbatches": 7}}  # type: ignore[attr-defined]
