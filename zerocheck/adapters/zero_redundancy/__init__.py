"""torch's ZeroRedundancyOptimizer over DistributedDataParallel: sharded states (ZeRO-1).

- `adapter.py`: DDP with ZeroRedundancyOptimizer over AdamW
- `collectives.py`: collectives of ZeroRedundancyOptimizer after those of DDP
- `layout.py`: layout of DDP with ZeroRedundancyOptimizer: the parameters that each rank updates
- `script.py`: text that wraps a model in DDP and shares out its optimizer states
"""
