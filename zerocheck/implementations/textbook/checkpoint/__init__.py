"""Checkpoints of the textbook sharders: any stage, on any number of ranks, loads what any wrote.

    DIRECTORY/
      latest                  names the generation that counts, with the checksum of its manifest
      lock                    held while a checkpoint is written
      generation-1f0a.../     one checkpoint, which nobody changes once it is named
        __0_0.distcp ...      tensors, one file per rank that wrote (torch.distributed.checkpoint)
        .metadata             where which range of which tensor lies
        training.json         the rest: loss scale, options of groups, where the data stands
        manifest.json         size and sha256 of every file above

Read them in this order: `chunk.py` (how a shard is described), `directory.py` (how files become a
checkpoint at one moment, and how damage is seen), `transfer.py` (all ranks together), `training.py`
(what is no tensor), `export.py` (whole tensors, without files) and `resumable.py` (what a sharder
saves and loads).
"""
