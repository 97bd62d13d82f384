"""Parts that several adapters share.

Collectives and live memory are predicted before anything is wrapped. `trace.py` records in which
order the bare model, on one device and without any sharder, comes to the modules that are units,
and its backward to their outputs, inputs and parameters. `collectives.py` of an adapter has its
rules, which turn that into calls: when it gathers, and when it reduces.

- `account.py`: arithmetic of memory layouts: which tensors have gradients and states when
- `calls.py`: recording of predicted calls as `protocol.layout.Call`
- `casting.py`: casts to the compute dtype of `case.precision`: of the inputs, and of all parameters
- `compiling.py`: torch.compile, as `case.training.compile` names its backend
- `config_class.py`: classes of implementations that are made of a user's config, each once
- `exports.py`: whole state of a trainer's state dict, by name and role
- `full_checkpoint.py`: single-file checkpoints: rank 0 writes, every rank reads
- `limits.py`: reasons to reject cases that several adapters share
- `live_memory.py`: live memory of a sharder within a step, on top of that of the model
- `meshes.py`: process groups of a device mesh, by the names of its axes
- `scaling.py`: torch's own dynamic loss scaling
- `schedules.py`: releases of torch whose schedules the predictions were compared with
- `script_text.py`: text that shards a model as a user of torch writes it
- `simulation.py`: traits of an adapter in a simulation of memory
- `sync.py`: schedule of gradient reductions (`case.sharding.sync`) for torch's implementations
- `trace.py`: trace of one microbatch of the bare model: forward, then backward
- `units.py`: choice of units: modules whose parameters are gathered, used and released together
- `user_config/`: user's own config of a library, read without torch and the library
- `whole_folder.py`: checkpoints of trainers that write no mark of a whole one: numbered folders
"""
