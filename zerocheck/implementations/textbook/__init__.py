"""ZeRO-1, -2 and -3, written to be read. Start with partition.py, then zero1.py.

Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC20 (arXiv 1910.02054). With P parameters of 4 bytes and W ranks, a rank holds

    replicated  4 P parameters     + 4 P gradients     + 8 P moments
    ZeRO-1      4 P                + 4 P               + 8 P / W
    ZeRO-2      4 P                + 4 P / W           + 8 P / W
    ZeRO-3      4 P / W            + 4 P / W           + 8 P / W

bytes between steps, padding aside (section 5 of the paper, in fp32 instead of mixed precision).
"""
