"""Global state that a job leaves changed in its rank process, which runs other code afterwards.

- `groups.py`: process groups of a rank, and the number of collectives called in each
- `guard.py`: guard around every job: afterwards global state is restored, or the rank is unfit
- `patches.py`: functions, classes, hooks and environment variables that code replaces
- `places.py`: places of global state: their common interface, and one change of it
- `process_settings.py`: settings of the process and of Python that apply to all its code
- `settings.py`: global settings with a getter and a setter
- `torch_settings.py`: settings and modes of torch that hold for all code of a process
"""
