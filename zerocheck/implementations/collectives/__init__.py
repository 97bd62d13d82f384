"""Collectives and live memory of each implementation, predicted before anything is wrapped.

`trace.py` sees in which order the bare model, on one device and without any sharder, comes to the
modules that are units, and its backward to their outputs, inputs and parameters. The file of a
sharder has its rules, which turn that into calls: when it gathers, and when it reduces.

- `ddp.py`: collectives of torch's DistributedDataParallel, and of ZeroRedundancyOptimizer after it
- `fsdp1.py`: collectives of torch's FSDP1: its rules, replayed on the trace of the bare model
- `fsdp2.py`: collectives of torch's FSDP2: its rules, replayed on the trace of the bare model
- `live_memory.py`: live memory of a sharder within a step, on top of that of the model
- `textbook.py`: collectives of the textbook ZeRO-1 and ZeRO-2, and the parts shared with ZeRO-3
- `trace.py`: trace of one microbatch of the bare model: forward, then backward
- `writing.py`: recording of predicted calls as `contract.layout.Call`
- `zero3.py`: collectives of the textbook ZeRO-3: its rules, replayed on the trace of the bare model
"""
