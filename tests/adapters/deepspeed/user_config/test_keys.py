"""The tables of keys against DeepSpeed itself: it says which keys it reads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from zerocheck.adapters.deepspeed.user_config import keys, precision

READ = """
import json, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.runtime import config as runtime
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero import offload_config

asked = set()

class Names:
    def __init__(self, names):
        self.names = names
    def __contains__(self, name):
        asked.add(name)
        return name in self.names
    def __iter__(self):
        return iter(self.names)

class Asked(dict):
    def get(self, name, default=None):
        asked.add(name)
        return super().get(name, default)
    def __getitem__(self, name):
        asked.add(name)
        return super().__getitem__(name)
    def __contains__(self, name):
        asked.add(name)
        return super().__contains__(name)
    def keys(self):
        return Names(list(super().keys()))

given = Asked(train_micro_batch_size_per_gpu=1, fp16={}, weight_quantization={})
runtime.DeepSpeedConfig(given)
def names(kind):
    return sorted(field.alias or name for name, field in kind.model_fields.items())
print(json.dumps({
    "TOP": sorted(asked),
    "ZERO": names(DeepSpeedZeroConfig),
    "OFFLOAD": sorted({
        *names(offload_config.DeepSpeedZeroOffloadParamConfig),
        *names(offload_config.DeepSpeedZeroOffloadOptimizerConfig),
    }),
    "BF16": names(DeepSpeedBF16Config),
    "FP16": names(DeepSpeedFP16Config),
    "REMOVED": sorted({
        *runtime._REMOVED_TOP_LEVEL_CONFIG_KEYS, *runtime._REMOVED_ZERO_CONFIG_KEYS
    }),
    "DTYPES": [
        str(name) for kind in (runtime.DtypeEnum.fp32, runtime.DtypeEnum.bf16)
        for name in kind._all_values
    ],
}))
"""


def test_every_key_that_deepspeed_reads_is_in_a_table() -> None:
    """And the tables have none that it does not read, but for those of its launcher."""
    pytest.importorskip("deepspeed")
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True)
    read = json.loads(done.stdout.splitlines()[-1])
    removed = set(read["REMOVED"])
    assert {name for table in (keys.TOP, keys.ZERO) for name in _of(table, "removed")} == removed
    assert set(read["TOP"]) <= keys.TOP.keys()
    asked_elsewhere = {
        "bfloat16",  # where there is no bf16
        "data_parallel_size",  # by `deepspeed.initialize`, as is the next
        "sequence_parallel_size",
    }
    assert keys.TOP.keys() - set(read["TOP"]) - removed <= asked_elsewhere
    for table in ("ZERO", "OFFLOAD", "BF16", "FP16"):
        ours = set(getattr(keys, table)) - removed
        assert ours == set(read[table]), table
    assert {name for name in read["DTYPES"] if "." not in name} <= precision.DTYPES.keys()


def _of(table: dict[str, keys.Key], kind: str) -> list[str]:
    return [name for name, key in table.items() if key.kind == kind]


def test_every_kind_of_key_says_what_it_must() -> None:
    """What is refused has a reason; what is passed or said has none to give."""
    tables = (keys.TOP, keys.ZERO, keys.OFFLOAD, keys.BF16, keys.DATA_TYPES, keys.CHECKPOINT)
    for table in tables:
        for name, key in table.items():
            if key.kind in ("refused", "removed"):
                assert key.why, name
            elif key.kind != "left out":
                assert not key.why, name
