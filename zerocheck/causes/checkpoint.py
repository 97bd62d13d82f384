"""Causes of wrong exports, and of damaged or half written checkpoints."""

from __future__ import annotations

from .registry import cause, family

REFUSED = cause(
    "refused",
    of=("roundtrip",),
    shows="A load refused an undamaged checkpoint.",
    usual="The library cannot read what it wrote for this layout.",
)
ZEROS = cause(
    "zeros",
    of=("export",),
    shows="An exported tensor is 0.",
    usual="A shard is merged before it is gathered.",
    attributed=r" (is|are) 0(;|$)",
)
ELEMENTS_IN_ANOTHER_ORDER = cause(
    "elements in another order",
    of=("export",),
    tier=2,
    shows="Elements of an exported tensor are in another order.",
    usual="Shards are joined in the order of files.",
    attributed=r"further (on|back) in|transposed|another order|no regular order",
)
ELEMENTS_OF_OTHER_PARAMETERS = cause(
    "elements of other parameters",
    of=("export",),
    tier=2,
    shows="An exported tensor has elements of other parameters.",
    usual="Offsets in the flat buffer are wrong when it is split.",
    attributed=r"further (on|back) in|no regular order|that the shards hold of",
)
PART_OF_IT_IS_0 = cause(
    "part of it is 0",
    of=("export",),
    shows="A part of an exported tensor is 0.",
    usual="The shards of one rank are not read.",
    attributed=r" (is|are) (0|missing)(;|$)",
)
LEFT_OUT = cause(
    "left out",
    of=("export",),
    shows="A tensor is missing from the export.",
    usual="Only what the optimizer has is exported.",
    attributed=r" (is|are) missing",
)
WRONG_SHAPE = cause(
    "wrong shape",
    of=("export",),
    shows="An exported tensor has another shape.",
    usual="Padding is exported, or a flat tensor is not reshaped.",
    attributed=r" ha(s|ve) \d+ elements, not \d+",
)
BUFFER_OF_NO_RANK = cause(
    "buffer of no rank",
    of=("export",),
    shows="An exported buffer has values that no rank holds.",
    usual="It is averaged or read before training.",
    attributed=r"buffer[^;]* (is|are) ",
)
OLDER_CHECKPOINT_LOST = cause(
    "older checkpoint lost",
    of=("durability",),
    shows="A killed writer leaves neither the new checkpoint nor the old one.",
    usual="The checkpoint is replaced in place.",
)
OLDER_CHECKPOINT = family(
    "older checkpoint {how}",
    of=("durability",),
    shows="Files of the older checkpoint are gone or overwritten.",
    usual="Files are deleted or truncated before the new ones are complete.",
    how=("removed", "written over"),
)
PART_OF_A_CHECKPOINT = cause(
    "part of a checkpoint",
    of=("durability",),
    shows="What loads after a kill is neither the old checkpoint nor the new one.",
    usual="There is no marker of a complete checkpoint.",
)
ELEMENTS_OF_NO_SAVED_STATE = cause(
    "elements of no saved state",
    of=("damage", "durability"),
    shows="Loaded elements are of no state that was saved.",
    usual="Damaged bytes are read without a checksum.",
)
DAMAGED = family(
    "{damage}",
    of=("damage",),
    shows="A checkpoint was damaged in this way and loaded without a word: a flipped bit, a "
    "truncated or removed file, or files of two steps.",
    usual="Files have no checksum, and their step is not compared.",
    damage=("flip", "truncate", "remove", "mix"),
)
