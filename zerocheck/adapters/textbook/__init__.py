"""ZeRO-1, -2 and -3, written to be read. Start with partition.py, adapter.py, zero1.py.

Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC20 (arXiv 1910.02054). With P parameters of 4 bytes and W ranks, a rank holds

    replicated  4 P parameters     + 4 P gradients     + 8 P moments
    ZeRO-1      4 P                + 4 P               + 8 P / W
    ZeRO-2      4 P                + 4 P / W           + 8 P / W
    ZeRO-3      4 P / W            + 4 P / W           + 8 P / W

bytes between steps, padding aside (section 5 of the paper, in fp32 instead of mixed precision).

- `adapter.py`: template of a step, which ZeRO-1, -2 and -3 fill in
- `bucket.py`: bucket of replicated parameters, shared by ZeRO-1 and ZeRO-2
- `collectives.py`: collectives of the stages: their rules, replayed on the trace of the bare model
- `flat.py`: flat buffer: parameters of one dtype end to end, of which each rank updates one shard
- `layout.py`: layouts of ZeRO-1, -2 and -3: partitions of flat buffers, from shapes alone
- `loss_scaling.py`: dynamic loss scaling for sharded gradients, and what a backward starts from
- `partition.py`: flat partition: parameters end to end, split into one equal shard per rank
- `precision.py`: mixed precision as in section 3.1 of the paper: 2 + 2 + 12 bytes per parameter
- `reduction.py`: reductions of gradients: over the ranks of a copy, in flight, and over copies
- `sharded_optimizer.py`: partitioned optimizer state, shared by all stages (section 5.1, `P_os`)
- `unit.py`: unit of ZeRO-3: a module whose parameters are gathered for its calls, and their order
- `zero1.py`: ZeRO-1: the optimizer state is partitioned (section 5.1 of the ZeRO paper, `P_os`)
- `zero2.py`: ZeRO-2: gradients are partitioned too (section 5.2 of the ZeRO paper, `P_os+g`)
- `zero3.py`: ZeRO-3: parameters are partitioned too (section 5.3 of the ZeRO paper, `P_os+g+p`)
- `checkpoint/`: checkpoints of the textbook sharders
"""
