"""DeepSpeed's ZeRO: an engine for each case, read where its ranks hold their partitions.

- `adapter.py`: base of DeepSpeed's stages: an engine takes the steps
- `alone.py`: DeepSpeed as one rank without the others, for a simulation of memory
- `checkpoint.py`: checkpoints of a DeepSpeedEngine: native, and universal
- `config.py`: translation of a case to DeepSpeed's configuration
- `configured_engine.py`: implementation made from the user's own DeepSpeed config
- `device.py`: accelerator of DeepSpeed for a device without data
- `full_state.py`: whole state as DeepSpeed itself reads it out, by each of its kinds of functions
- `idle_ranks.py`: ranks without elements of a parameter group, for the scope of known issues
- `layout.py`: layouts of DeepSpeed's stages between steps, from shapes alone
- `library.py`: DeepSpeed in a rank process: imported, made ready, and put back
- `options.py`: options of DeepSpeed's engine: fields of its configuration that cases vary
- `precision.py`: dtypes in which each stage sums, divides and reduces
- `refusals.py`: cases that DeepSpeed cannot run, with the reason, known from the case alone
- `releases.py`: differences of earlier releases of DeepSpeed from 0.19.8
- `stage12.py`: stages 1 and 2, and their base with stage 3
- `stage3.py`: stage 3: parameters are sharded as well, each one over all ranks
- `user_config/`: DeepSpeed config of the user's own, read without torch and DeepSpeed
"""
