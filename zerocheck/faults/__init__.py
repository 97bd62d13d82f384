"""Bugs planted on purpose, as proof that the judge detects them.

- `accumulation.py`: faults in the accumulation of microbatches
- `article.py`: two sharders of a well-known tutorial on ZeRO
- `buffers.py`: faults in buffers, such as the running statistics of batch norm
- `causes_page.py`: page of all causes (docs/causes.md)
- `checkpoints.py`: faults in the content of a checkpoint, or in what a load takes from it
- `clipping.py`: faults in the norm of the gradient and in clipping
- `communication.py`: faults in communication: more is sent than necessary
- `compiling.py`: faults of a compiled model, which estimated bounds must still detect
- `deepspeed.py`: faults planted into DeepSpeed's engine; they need the extra `deepspeed`
- `dtypes.py`: faults that only a model with parameters of two dtypes shows
- `exports.py`: faults in the whole state that a library exports
- `fault.py`: description of a fault: its source, and the finding that it must cause
- `factored.py`: faults in factored states: means and norms of shards, and checkpoints of them
- `files.py`: faults in the commit of a checkpoint's files, and in the detection of damage
- `forward.py`: faults in the forward: other samples, other random numbers, other parameters
- `freezing.py`: faults with parameters that are unfrozen later
- `gradient.py`: faults in the reduction of gradients over ranks
- `hosts.py`: faults that are hidden on one host
- `loss_scaling.py`: faults in dynamic loss scaling and in skipping steps that overflow
- `memory.py`: faults of memory: every number is right, and a rank holds more than it should
- `muon.py`: faults in Muon's update: Newton-Schulz of other matrices, other factors on the learning
  rate
- `muon_states.py`: faults in Muon's momentum and decay, in its checkpoints, and in what is left to
  AdamW
- `offloading.py`: faults of CPU offload: copies that come too late, or too early
- `omissions.py`: faults that silently leave something out of the reduction or the update
- `ownership.py`: faults in the ownership of elements
- `overflow.py`: faults in looking for an overflow, which show where one gradient alone overflows
- `padding.py`: faults that read padding
- `parts.py`: parts shared by several faults
- `precision.py`: faults that only mixed precision shows: masters, their copies, and declared dtypes
- `publishing.py`: faults in the publishing of updated parameters
- `races.py`: faults in waiting: right if a collective is already over, wrong if it is late
- `registry.py`: all faults by name
- `replicas.py`: faults of a mesh of two axes: sums, divisions and groups of the wrong axis
- `restoring.py`: faults in restoring a state of mid-training, as after loading a checkpoint
- `sgd.py`: faults in SGD itself, in its momentum, and in its inputs
- `shapes.py`: faults with parameters of unusual shape or memory: 0-d, empty, transposed
- `tensor_parallel.py`: faults of tensor parallelism: an axis of the mesh taken for the other
- `unpredicted.py`: faults of memory in implementations without a layout
- `unsharded.py`: faults in optimizers of torch that are their own reference
- `unused.py`: faults with parameters that have no gradient, or no place in the buffers
- `update.py`: faults in AdamW itself and in its inputs
- `user_optimizer.py`: faults in sharding optimizers of the user's own
- `window.py`: faults within a step: memory is right at the end of each phase, and too large before
- `elsewhere/`: bugs of other frameworks, planted to measure a diagnosis that did not know them
- `injections/`: faults injected at the collectives of any implementation
"""
