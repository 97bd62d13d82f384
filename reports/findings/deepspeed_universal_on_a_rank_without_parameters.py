"""torch and DeepSpeed only: a universal checkpoint fails where a rank holds nothing.

    python deepspeed_universal_on_a_rank_without_parameters.py

Three ranks share a group of two elements.
"""

import os
import sys
import tempfile
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.checkpoint import ds_to_universal
from torch import nn

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))


def engine_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    zero: dict[str, Any],
    *,
    universal: bool = False,
) -> Any:
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "reduce_bucket_size": 1024,
            "stage3_param_persistence_threshold": 0,
            **zero,
        },
        "checkpoint": {"load_universal": universal},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine: Any, inputs: torch.Tensor) -> None:
    engine.backward(engine(inputs).square().sum())
    engine.step()


def convert(folder: str) -> None:
    tag = Path(folder, "latest").read_text()
    options = Namespace(
        input_folder=f"{folder}/{tag}",
        output_folder=f"{folder}/{tag}_universal",
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with redirect_stdout(None), open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        ds_to_universal.main(options)


def run(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3)
    model = nn.Linear(1, 1)
    engine = engine_of(model, torch.optim.AdamW(model.parameters()), {"stage": 1})
    step(engine, torch.tensor([[1.0]]))
    engine.save_checkpoint(folder)
    if rank == 0:
        convert(folder)
    dist.barrier()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loading = engine_of(model, optimizer, {"stage": 1}, universal=True)
    try:
        loading.load_checkpoint(folder)
        said = "loaded"
    except IndexError as error:
        said = f"IndexError: {error}"
    Path(folder, f"said-{rank}").write_text(said)
    os._exit(0)  # the others wait for this rank
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(run, (folder,), 3, join=False)
        ranks.processes[2].join()
        said = Path(folder, "said-2").read_text()
        for process in ranks.processes:
            process.kill()
            process.join()
        print(f"rank 2: {said}")
        sys.exit(said != "loaded")
