"""Models that users bring: some that can be judged, and some that cannot."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORDS, LENGTH = 20, 6


class Layer(nn.Module):
    """A transformer layer, called with a keyword, with dropout."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, *, heads):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, heads, width // heads)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.mlp(x)


class Gpt(nn.Module):
    """Tied head, positions in a buffer that is in no checkpoint."""

    def __init__(self, width=8, layers=2):
        super().__init__()
        self.wte = nn.Embedding(WORDS, width)
        self.wpe = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("positions", torch.arange(LENGTH), persistent=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(self.positions)
        for layer in self.layers:
            x = layer(x, heads=2)
        return self.head(self.norm(x))


def tokens(generator):
    drawn = torch.randint(WORDS, (2, LENGTH + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def cross_entropy(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def gpt():
    return Gpt(), tokens, cross_entropy


class Conv(nn.Module):
    """Batch norm, no list of blocks; the forward returns the loss."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 2)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, images, classes):
        return F.cross_entropy(self.head(self.features(images).mean((2, 3))), classes)


def images(generator):
    """Another number of samples in every microbatch."""
    count = int(torch.randint(2, 5, (), generator=generator))
    return torch.rand(count, 2, 5, 5, generator=generator), torch.randint(
        5, (count,), generator=generator
    )


def conv():
    return Conv(), images


class Moe(nn.Module):
    """Each sample goes to one of three experts."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        share, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * share[rows, None])
        return self.head(x + y).square().mean()


def vectors(generator):
    return torch.randn(2, 4, generator=generator) * 3


def moe():
    return Moe(), vectors


class Odd(nn.Module):
    """A frozen embedding, an unused layer, a bf16 layer, a 0-d parameter, a transposed one, a layer
    used twice, checkpointing, a mask in the checkpoint, and layers in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(WORDS, 4).requires_grad_(False)
        self.twice = nn.Linear(4, 4)
        self.narrow = nn.Linear(4, 4).to(torch.bfloat16)
        self.unused = nn.Linear(3, 2)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.still = nn.Dropout(0.5).eval()
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, tokens):
        x = self.wte(tokens)
        x = checkpoint(self.twice, self.twice(x), use_reentrant=False)
        x = self.narrow(x.to(torch.bfloat16)).float() * self.gain * self.mask
        return (self.still(x) @ self.turned).square().mean()


def odd():
    return Odd(), lambda generator: tokens(generator)[0]


class Plain(nn.Module):
    """Without 0-d, transposed and bf16 parameters, what all implementations can run."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(WORDS, 4).requires_grad_(False)
        self.body = nn.Linear(4, 4)
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(torch.relu(self.body(self.wte(tokens)))).square().mean()


def plain():
    return Plain(), lambda generator: tokens(generator)[0]


class Times(torch.autograd.Function):
    """Product with a weight that it keeps itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class Bypassing(nn.Module):
    """Weights of children are used without a call of the child."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(WORDS, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        self.scales = nn.ParameterList(torch.full((4,), 1.0 + n) for n in range(2))
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, tokens):
        x = self.blocks[1](torch.tanh(Times.apply(self.wte(tokens), self.blocks[0][0].weight)))
        x = self.body[1](F.relu(self.body[0](x)) * self.body[0].bias)
        for scale in self.scales:
            x = x * scale
        return F.linear(x, self.head.weight).square().mean()


def bypassing():
    return Bypassing(), lambda generator: tokens(generator)[0]


class Running(nn.Module):
    """Its running mean is another tensor after each forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        y = self.layer(x)
        self.mean = self.mean * 0.9 + y.detach().mean(0) * 0.1
        return (y - self.mean).square().mean()


def running():
    return Running(), vectors


# What cannot be judged.

count = itertools.count()


def alone():
    return nn.Linear(2, 2)


def failing():
    raise RuntimeError("no weights here")


def not_seeded():
    model = nn.Linear(4, 1)
    nn.init.constant_(model.bias, next(count))
    return model, vectors, lambda outputs, target: outputs.sum()


def fixed_batch():
    return nn.Linear(4, 1), lambda generator: (torch.ones(2, 4), torch.ones(2, 1)), F.mse_loss


def global_batch():
    return Moe(), lambda generator: torch.randn(2, 4)


def double():
    return nn.Linear(4, 1).double(), vectors


def vector_loss():
    return nn.Linear(4, 1), vectors


def no_target():
    return nn.Linear(4, 1), vectors, F.mse_loss


def batch_takes_nothing():
    return nn.Linear(4, 1), lambda: torch.ones(2, 4)


def nothing_trains():
    model = nn.Linear(4, 1).requires_grad_(False)
    return model, lambda generator: (vectors(generator), torch.ones(2, 1)), F.mse_loss


class Counting(nn.Module):
    """It counts its forwards outside of any buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x).square().mean() * self.calls


def counting():
    return Counting(), vectors


class Noisy(nn.Module):
    """Its noise comes from a generator that nobody seeds."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return (self.layer(x) + next(count)).square().mean()


def random_forward():
    return Noisy(), vectors


def lazy():
    return nn.LazyLinear(1), vectors


def broken_forward():
    return nn.Linear(3, 1), vectors


def meta():
    return nn.Linear(4, 1, device="meta"), vectors


def infinite():
    return Moe(), lambda generator: vectors(generator) * float("inf")


number = 7


class Outputs:
    """As transformers give them: the loss among other things."""

    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


class Named(nn.Module):
    """It takes keywords, and returns an object with `.loss`."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)

    def forward(self, *, inputs, labels):
        logits = self.head(self.blocks[0](inputs))
        return Outputs(F.mse_loss(logits, labels), logits)


def named():
    def batch(generator):
        return {
            "labels": torch.rand(3, 2, generator=generator),
            "inputs": torch.rand(3, 4, generator=generator),
        }

    return Named(), batch
