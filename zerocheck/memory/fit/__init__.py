"""Search for what fits into a device's memory: `zerocheck memory MODEL --fit`.

- `assemble.py`: assembly of the report: rows with their costs, what does not fit, and advice
- `bounds.py`: lower bounds of the peak by the formulas, which spare simulations
- `choices.py`: choices that are tried: implementation, units, resharding, checkpointing, batches
- `recommend.py`: order of the rows by cost, the row to take, and the reasons
- `result.py`: result of a search, as data: `zerocheck memory --fit --json` writes it
- `search.py`: search for the fewest ranks of each choice
- `step_time.py`: step time on paper: compute of each unit against the bytes of its collectives
- `text.py`: table and sentences of a search
"""
