"""Execution of one job in one rank: build, restore, step, observe. No transport.

- `attribution.py`: attribution of one rank's memory: every allocated byte, by category and holder
- `checkpoints.py`: harness around a checkpoint: before the load, at the load, at the save
- `collective_release.py`: release of memory used by a collective on the thread that is measured
- `collective_storages.py`: storages that collectives gather into and reduce from
- `collective_trace.py`: trace of collectives within the steps, as `protocol.layout.Call`
- `collectives.py`: dispatch mode that sees every collective of torch's `c10d` operators
- `delays.py`: random delays that reorder ranks, and so show races that a quiet machine hides
- `forward_probe.py`: probe of a forward for what decides the last bits of a local gradient
- `gpu_memory.py`: memory attribution on a GPU, by the caching allocator's records
- `holders.py`: storages that Python objects hold, with their category
- `measure.py`: memory measurement of one rank during its steps, phase by phase
- `poison.py`: filling of uninitialised memory with NaN, so that reading it is detected
- `randomness.py`: random states of a rank, at the entry of a loss and at the end of its forward
- `rank.py`: execution of a job in a rank process: the target of the rank pool
- `recorder.py`: copying of the shards that an implementation exposes into the rank's arena
- `steps.py`: one rank's run of one case: build, restore, step after step, observe
- `leaks/`: guard of global state around each job
"""
