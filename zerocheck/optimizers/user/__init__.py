"""User's own optimizer class, which alone and on whole parameters is its own reference.

- `inspection.py`: what a class is like, and whether it can be judged
- `optimizer.py`: optimizer whose step a process of its own runs
- `process.py`: process that runs steps of the user's classes, apart from the judge
"""
