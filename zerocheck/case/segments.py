"""Training segments of a resumed case: train, save, load, continue.

Segment 0 trains from the start; segment k loads what segment k - 1 saved, on other ranks.
"""

from __future__ import annotations

import msgspec

from .schema import Case


def segments_of(case: Case) -> list[Case]:
    """Return the case of each segment; one segment, the case itself, if nothing is resumed.

    `training.first` and `training.steps` of a segment are the indices of its first step and after
    its last; `resume` holds the segments that are still to come.
    """
    segments = [case]
    for number, segment in enumerate(case.resume):
        before = segments[-1].training.steps
        segments.append(
            msgspec.structs.replace(
                case,
                mesh=segment.mesh,
                training=msgspec.structs.replace(
                    case.training, first=before, steps=before + segment.steps
                ),
                resume=case.resume[number + 1 :],
            )
        )
    return segments


def in_background(case: Case) -> bool:
    """Return True if the checkpoint that ends a segment is to be written in the background."""
    return bool(case.resume) and case.resume[0].background


def end_of(case: Case) -> int:
    """Return the index after the last step that a segment's ranks take.

    While a checkpoint is written in the background they take one step more than it holds.
    """
    return case.training.steps + in_background(case)


def is_one_forward(case: Case, index: int) -> bool:
    """Return True if a pass is the forward of one microbatch: the one that ends a case.

    After the last step one more loss shows which parameters were published. A case of one step goes
    on to a second gradient, since it has seen only one, and so does a resumed one. In a pipeline
    one stage alone knows the loss, and the others would wait for its gradient.
    """
    training = case.training
    several = training.steps > 1 and not training.first and not case.resume
    several = several and not case.axes.has("pp")
    return several and index == end_of(case)


def only_loads(case: Case, number: int) -> bool:
    """Return True if segment `number` only tries to load a killed or damaged checkpoint."""
    segment = case.resume[number - 1]
    return segment.killed is not None or segment.damage != "none"


def samples_read(case: Case, steps: int) -> int:
    """Count the samples that all data-parallel ranks of a segment read in `steps` steps."""
    return case.axes.data_parallel_size * case.training.microbatches * case.data.batch * steps


def samples_before(case: Case, number: int) -> int:
    """Count the samples read before segment `number` begins."""
    return sum(
        samples_read(segment, segment.training.steps - segment.training.first)
        for segment in segments_of(case)[:number]
    )
