"""Checkpoints of the textbook sharders: any stage, on any number of ranks, loads what any wrote.

    DIRECTORY/
      latest                  names the generation that counts, with the checksum of its manifest
      lock                    held while a checkpoint is written
      generation-1f0a.../     one checkpoint, which nobody changes once it is named
        __0_0.distcp ...      tensors, one file per rank that wrote (torch.distributed.checkpoint)
        .metadata             where which range of which tensor lies
        training.json         the rest: loss scale, options of groups, where the data stands
        manifest.json         size and sha256 of every file above

Read them in this order: chunk, directory, transfer, training, export, resumable.

- `chunk.py`: shard as a range of a flat tensor, in the terms of torch.distributed.checkpoint
- `directory.py`: atomic commit of a checkpoint's files, and detection of damage
- `export.py`: whole tensors from the shards of all ranks, without files
- `resumable.py`: saving and loading of a textbook sharder, split into methods of one meaning each
- `training.py`: non-tensor content of a checkpoint: `training.json`
- `transfer.py`: collective writing and reading: an error on one rank is raised on all
"""
