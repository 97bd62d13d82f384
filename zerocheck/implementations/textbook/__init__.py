"""ZeRO-1, -2 and -3, written to be read. Start with partition.py, then zero1.py.

Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC20 (arXiv 1910.02054). With P parameters of 4 bytes and W ranks, a rank holds

    replicated  4 P parameters     + 4 P gradients     + 8 P moments
    ZeRO-1      4 P                + 4 P               + 8 P / W
    ZeRO-2      4 P                + 4 P / W           + 8 P / W
    ZeRO-3      4 P / W            + 4 P / W           + 8 P / W

bytes between steps, padding aside (section 5 of the paper, in fp32 instead of mixed precision).

- `bucket.py`: bucket of replicated parameters, shared by ZeRO-1 and ZeRO-2
- `bytes.py`: layouts of ZeRO-1, -2 and -3: partitions of flat buffers, from shapes alone
- `flat.py`: flat parameter: the parameters of a unit end to end, of which each rank keeps 1/W
- `loss_scaling.py`: dynamic loss scaling for sharded gradients, and what a backward starts from
- `master.py`: mixed precision as in section 3.1 of the ZeRO paper: 2 + 2 + 12 bytes per parameter
- `partition.py`: flat partition: parameters end to end, split into one equal shard per rank
- `reduction.py`: reduce-scatters in flight: launched in the backward, waited for later
- `replicas.py`: replication: copies of the sharded model, on the replicate axis of a mesh
- `sharded_adamw.py`: partitioned optimizer state, shared by all stages (section 5.1, `P_os`)
- `zero1.py`: ZeRO-1: the optimizer state is partitioned (section 5.1 of the ZeRO paper, `P_os`)
- `zero2.py`: ZeRO-2: gradients are partitioned too (section 5.2 of the ZeRO paper, `P_os+g`)
- `zero3.py`: ZeRO-3: parameters are partitioned too (section 5.3 of the ZeRO paper, `P_os+g+p`)
- `checkpoint/`: checkpoints of the textbook sharders
"""
