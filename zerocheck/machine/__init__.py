"""Machine on which ranks run: its memory, its devices, its signals, and who starts the ranks.

- `devices.py`: devices of cases: their names, and the random states that a forward can draw from
- `garbage.py`: garbage collection in processes that share pages
- `host.py`: memory of this host, files that replace it, limits of control groups
- `hosts.py`: hosts of the ranks, from the short form in a case to a place for each rank
- `launcher.py`: environment of a launcher (torchrun), and the report of the exit code to it
- `place_variables.py`: environment variables with the host of a rank, and whether they were read
- `shortage.py`: shortages of the machine, by the errors that they cause, and what to do
- `signals.py`: signals that end a command, raised where they strike and where zerocheck waits
- `warning_filters.py`: filters of warnings in the processes of zerocheck
"""
