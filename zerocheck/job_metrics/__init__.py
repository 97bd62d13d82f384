"""Metrics of a running job: times, bytes, memory, and the failure patterns that they show.

- `activations.py`: bytes of activations: what the forwards made, and the backward needs, when it
  begins
- `failure_patterns.py`: failure patterns of sharded training, in words, with the figures that show
  them
- `figures_exchange.py`: exchange of figures over the store of the process group: no rank ever waits
  for another
- `job_history.py`: history of a job on rank 0: its last figures, the patterns that they show, and
  its summary
- `job_meter.py`: meter of a job: figures of all ranks, their sinks, and what they show
- `model_size.py`: size of a live model, and memory of a rank: what the figures of a job are
  compared with
- `options.py`: options of the metrics of a job, checked
- `out_of_memory.py`: where a rank ran out of memory: the phase of the step, the module and the line
  of the script
- `rank_meter.py`: meter of the steps of one rank: seconds of each, and more of a few
- `records.py`: records of the metrics of a job, one to a line of `metrics.jsonl`
- `sinks.py`: where metrics go: lines of JSON, Prometheus, TensorBoard
- `step_timer.py`: timer of one step: its collectives, its forwards and its optimizer
- `timed_collectives.py`: times of the collectives that this rank calls, by a dispatch mode on
  torch's operators
- `timed_step.py`: figures of one step of a job, from the times of all ranks
"""
