"""Memory of a rank in advance: formulas, known models, and the real code on fake tensors.

- `advice.py`: advice on what would fit: each alternative is simulated before it is reported
- `allocation_tracker.py`: allocation tracker of one rank: origin, module, phase and release
- `analyse.py`: analysis of a setup: simulation, extrapolation where it is proven, and report
- `caching_allocator.py`: model of the caching allocator of CUDA tensors: which memory it takes from
  the driver, and keeps
- `collectives.py`: bytes that one rank sends in a collective, by the algorithms of a ring
- `experts.py`: mixture of experts of the presets: a router, and MLPs that tokens are sent to
- `extrapolate.py`: extrapolation from a model with a few blocks: a block in the middle repeats
- `fixed.py`: fields that an implementation fixes, such as a user's config
- `fit/`: search for what fits into a device's memory: `zerocheck memory MODEL --fit`
- `formulas.py`: formulas of the ZeRO paper for bytes per rank and communication per step
- `gpu_kernels.py`: kernels of a GPU that torch's CPU or its simulated device does not have
- `host.py`: memory of the host that a rank takes whose shards are offloaded, and what is copied
- `huggingface.py`: model of a config.json of Hugging Face transformers
- `kernel_workspace.py`: memory that torch's kernel for sums takes while it runs
- `log.py`: log of the allocation tracker: storages, when their sizes changed, and collectives
- `operations.py`: floating-point operations of a forward, counted from the shapes of its operators
- `optimizer_parts.py`: parts of a model by optimizer, and the formulas for the bytes of them all
- `pipeline.py`: pipeline parallelism: the stage of a rank, and the schedule of its microbatches
- `presets.py`: shapes and parameter counts of known models, as data
- `reserved.py`: memory that the caching allocator of a GPU would reserve for a simulated run
- `result.py`: result of a simulation, as data: `zerocheck memory --json` writes it
- `samples.py`: samples of a microbatch: token ids, or those that a factory draws
- `setup.py`: input of a simulation: the model, the implementation, ranks and options
- `simulate.py`: simulation: the implementation's own code on tensors without data
- `source.py`: source of the model, a preset or the user's factory, and its blocks
- `tables.py`: well-known tables from the formulas, next to simulated and measured bytes
- `tensor_parallel.py`: tensor parallelism of a model: layers that are sharded, and a rank's part
- `text.py`: report of a simulated rank, in words and tables
- `timeline.py`: live memory over time, from the log of a run
- `transformer.py`: modules of the presets: decoder-only transformers
- `verdict.py`: verdict on whether a simulated rank fits into a device
"""
