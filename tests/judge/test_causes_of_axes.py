"""What is said of pieces in another order, of repeated biases, and of random states."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from zerocheck.case.mesh import mesh_of
from zerocheck.case.schema import Block, Case, Model, Sharding
from zerocheck.compat import local_index
from zerocheck.judge.diagnose.axes import order_of_pieces, with_repeated_biases
from zerocheck.judge.layout import ParameterLayout
from zerocheck.judge.obligations import loss
from zerocheck.models.network import build_model
from zerocheck.protocol.verdicts import Violation

CASE = Case(
    mesh=(6,),
    model=Model(inputs=2, width=3, outputs=6, blocks=(Block(kind="mlp", hidden=4),)),
    sharding=Sharding(tensor_parallel=2),
)
MODEL = build_model(CASE)
LAYOUT = ParameterLayout.of(MODEL, CASE)
FLAT = torch.cat([p.detach().reshape(-1) for p in MODEL.parameters()])
HEAD = LAYOUT.by_name["head.weight"]


def violation(*names: str) -> Violation:
    return Violation(
        obligation="publish",
        step=-1,
        role="parameter",
        tensors=names,
        ranks=(),
        explanation="other",
        causes=("initial state",),
    )


def seen(rows: list[int]) -> torch.Tensor:
    """The flat vector, with the rows of the head in this order."""
    flat = FLAT.clone()
    own = FLAT[HEAD.start : HEAD.stop].view(HEAD.shape)
    flat[HEAD.start : HEAD.stop] = own[rows].reshape(-1)
    return flat


def test_pieces_of_a_plain_shard_are_named_and_others_are_not() -> None:
    given = violation("head.weight")
    # Rank d 2 + t has row t 3 + d; who takes the shard for a plain one takes that for row d 2 + t.
    for rows in ([0, 3, 1, 4, 2, 5], [0, 2, 4, 1, 3, 5]):
        found = order_of_pieces(given, seen(rows), FLAT, LAYOUT, CASE)
        assert found is not None and found.causes == ("pieces in the order of a plain shard",)
    for rows in ([1, 0, 2, 3, 4, 5], [0, 3, 1, 4, 5, 2]):
        assert order_of_pieces(given, seen(rows), FLAT, LAYOUT, CASE) is given
    changed = seen([0, 3, 1, 4, 2, 5])
    changed[HEAD.start] += 1
    assert order_of_pieces(given, changed, FLAT, LAYOUT, CASE) is given
    two = violation("head.weight", "stem.bias")
    changed = seen([0, 3, 1, 4, 2, 5])
    changed[LAYOUT.by_name["stem.bias"].start] += 1
    assert order_of_pieces(two, changed, FLAT, LAYOUT, CASE) is two
    assert order_of_pieces(None, FLAT, FLAT, LAYOUT, CASE) is None
    moment = replace(given, role="exp_avg")
    assert order_of_pieces(moment, seen([0, 3, 1, 4, 2, 5]), FLAT, LAYOUT, CASE) is moment


def test_row_wise_biases_alone_are_repeated() -> None:
    changed = with_repeated_biases(FLAT, LAYOUT, CASE)
    bias = LAYOUT.by_name["blocks.0.down.bias"]
    assert torch.equal(changed[bias.start : bias.stop], 2 * FLAT[bias.start : bias.stop])
    assert int((changed != FLAT).sum()) == bias.stop - bias.start


def test_ranks_that_share_layers_must_draw_alike() -> None:
    mesh = mesh_of((4,), (2,))
    assert loss.check_random([[b"a"], [b"a"], [b"b"], [b"b"]], mesh, step=0) is None
    apart = loss.check_random([[b"a"], [b"a"], [b"b"], [b"c"]], mesh, step=0)
    assert apart is not None
    assert apart.causes == ("tensor-parallel ranks seeded apart",) and apart.ranks == (2, 3)
    alike = loss.check_random([[b"a"], [b"a"], [b"a"], [b"a"]], mesh, step=0)
    assert alike is not None and alike.causes == ("seed for all",)


class _Mesh:
    """A mesh of 3 x 2 ranks, as one of them sees it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def size(self, axis: int) -> int:
        return (3, 2)[axis]

    def get_local_rank(self, axis: int) -> int:
        return divmod(self._rank, 2)[axis]


def test_uneven_rows_lie_where_fsdp2_puts_them() -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    class Cut:
        shape = (7, 2)
        placements = (_StridedShard(0, split_factor=2), Shard(0))

        def __init__(self, rank: int) -> None:
            self.device_mesh = _Mesh(rank)

    held = [local_index(Cut(rank)) for rank in range(6)]  # type: ignore[arg-type]
    rows = [(one.start, one.stop) for one, _ in held]
    assert rows == [(0, 2), (4, 5), (2, 4), (5, 6), (4, 4), (6, 7)]
    assert all(columns == slice(0, 2) for _, columns in held)
