"""Execution of cases on rank processes, and the outcome of each.

- `environment.py`: environment of a run, for the journal and for replay
- `host_memory.py`: check that a case fits in the memory of this host
- `launch.py`: rank processes of a command: started here, or by a launcher
- `machine.py`: check of this machine before ranks start
- `outcome.py`: outcome of a case: the verdict on what its ranks did
- `rank_pool.py`: rank processes as a run sees them, wherever they are
- `rank_replies.py`: replies of rank processes: decoded, and checked for their kind
- `rank_requests.py`: requests before a run to rank processes, since they run the user's code
- `reused.py`: outcomes of cases that other runs have judged: shards, or an interrupted run
- `segments.py`: jobs of a resumed case, one per training segment, and what is done between
- `shared_ranks.py`: rank processes that all tests of single cases share
- `trial.py`: trial: one case, run on rank processes and judged
- `user_model.py`: user's own model as that of every case: `--model`, or `fixed = {"model": ...}`
- `user_optimizer.py`: user's own optimizer as that of every case: `--optimizer`, or `fixed`
"""
