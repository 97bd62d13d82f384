"""Checks of existing checkpoints: content, errors, differences between two.

`formats` recognises what a directory holds and opens it as a `Source` (`source`): `dcp` with
`dcp_metadata` and `tiling`, or `whole_files` over `torch_save` and `safetensors_file`. `contents`
gives every tensor its role and name, with `optimizer_keys` and `groups`. `examine` checks one
(`values`, `steps`, `moment_bound`), `compare` two (`explain`). `result` is what they say, `text`
how it is shown.

Nothing of a checkpoint is executed: pickles are read with `weights_only=True`, and the index of
torch.distributed.checkpoint with an unpickler that admits its own classes alone.
"""
