"""The jobs of a case: one, or one for each leg of a resumed case, with their directories."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec

from ..case.legs import legs_of, samples_before
from ..case.schema import Case
from ..drive.observation import Job


def jobs_of(implementation: str, case: Case, *, trace: bool = False) -> list[Job]:
    """What the ranks of each leg are asked; `Folder` says where `save` and `load` are.

    Leg k loads what leg k - 1 saved. Each saves into a directory of its own.
    """
    jobs = []
    for number, leg in enumerate(legs_of(case)):
        into = case.resume[number - 1].into if number else ""
        jobs.append(
            Job(
                implementation=into or implementation,
                case=leg,
                trace=trace,
                save=str(number) if leg.resume else "",
                load=str(number - 1) if number else "",
                samples=samples_before(case, number),
            )
        )
    return jobs


class Folder:
    """A temporary directory for the checkpoints of one case."""

    def __init__(self) -> None:
        self._path = Path(tempfile.mkdtemp(prefix="zerocheck-"))

    def placed(self, job: Job) -> Job:
        """The job, with paths in place of the numbers of its checkpoints."""
        save = str(self._path / job.save) if job.save else ""
        load = str(self._path / job.load) if job.load else ""
        return msgspec.structs.replace(job, save=save, load=load)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self._path, ignore_errors=True)
