"""Checks of existing checkpoints: content, errors, differences between two.

Nothing of a checkpoint is executed: pickles are read with `weights_only=True`, and the index of
torch.distributed.checkpoint with an unpickler that admits its own classes alone.

- `bounded_pickle.py`: unpickling whose work is bounded by the size of the file
- `compare.py`: comparison of two checkpoints, and how one tensor became another
- `contents.py`: content of a checkpoint: every tensor with its role and name, step counts, settings
- `dcp.py`: directories of torch.distributed.checkpoint: `.metadata` and `*.distcp`
- `dcp_metadata.py`: index of torch.distributed.checkpoint, `.metadata`, read without trust
- `deepspeed_files.py`: partitions that DeepSpeed wrote, put together
- `examine.py`: examination of one checkpoint, without another to compare with
- `formats.py`: recognition of the format of a directory or file, by its content
- `groups.py`: param groups of a checkpoint, whichever way they are written
- `moment_bound.py`: bound on exp_avg given exp_avg_sq, which every run of AdamW obeys
- `optimizer_keys.py`: keys of optimizer state and param groups, in each form that torch writes
- `places.py`: positions of elements in a tensor, and views of a tensor for bitwise comparison
- `records.py`: files of torch.save, loaded without executing anything, checksums verified
- `result.py`: results of `zerocheck checkpoint`; `--json` writes these structs unchanged
- `safetensors_file.py`: one safetensors file, read and written without the safetensors package
- `source.py`: protocol of formats: the content of a checkpoint, read one tensor at a time
- `text.py`: a report of checkpoints as text
- `tiling.py`: check that the chunks of a tensor cover it exactly once
- `values.py`: checks of the values in one checkpoint: finite, moments that AdamW can have
- `whole_files.py`: several files and folders as one checkpoint
"""
