"""DeepSpeed's ZeRO: an engine for each case, read where its ranks hold their partitions.

library      DeepSpeed as it is imported, joined to the ranks, and undone
config       its configuration from a case
precision    what each stage does in which dtype, and how it is asked to
refusals     what it cannot run
bytes        what each stage holds between steps
sharder      what all stages share; stage 0
partition    what a rank holds of a flat group, as shards
partitioned  what stages 1 to 3 share; stages 1 and 2
stage3       stage 3
checkpoint   its checkpoints, native and universal
read_out     what it gives as the whole state
given        a class of a config of the user's own
"""

from .sharder import DeepSpeed0
from .stage3 import DeepSpeed3
from .stage12 import DeepSpeed1, DeepSpeed2

__all__ = ["DeepSpeed0", "DeepSpeed1", "DeepSpeed2", "DeepSpeed3"]
