"""Names of implementations and of faults to inject."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from zerocheck import catalogue
from zerocheck.catalogue import (
    BUILT_IN,
    INJECTED,
    NAMED,
    OF_EXTRAS,
    WITH_OPTIMIZERS,
    apart,
    check_config,
    check_spelling,
    extra_of,
    family,
    innermost,
    is_built_in,
    is_config,
    missing,
    modules_of,
)
from zerocheck.errors import UsageError
from zerocheck.faults.injections.injection import Injection
from zerocheck.faults.registry import FAULTS, injected_into


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fsdp2", ("fsdp2", "")),
        ("fsdp2+gather-stale", ("fsdp2", "gather-stale")),
        ("my_fsdp.py:MyFSDP+average-becomes-sum", ("my_fsdp.py:MyFSDP", "average-becomes-sum")),
        ("a+b/my.py:My", ("a+b/my.py:My", "")),
        ("a+b/my.py:My+norm-local", ("a+b/my.py:My", "norm-local")),
        ("fsdp2+norm-local+gather-stale", ("fsdp2+norm-local", "gather-stale")),
        ("fsdp2+", ("fsdp2", "+")),
        ("a+b/ds_config.json", ("a+b/ds_config.json", "")),
        ("ds_config.json+norm-local", ("ds_config.json", "norm-local")),
    ],
)
def test_a_name_comes_apart(name: str, parts: tuple[str, str]) -> None:
    assert apart(name) == parts


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "fsdp2+gather-stael",
            "fault to inject into fsdp2, 'gather-stael'; did you mean 'gather-s",
        ),
        ("fsdp3+gather-stale", "unknown implementation 'fsdp3'; did you mean"),
        ("fsdp2+", "unknown fault to inject into fsdp2, '[+]'"),
        ("my.py+gather-stale", "name the class or build function in it too: my.py:NAME"),
        ("ds_config.json+gather-stael", "fault to inject into ds_config.json, 'gather-stael'"),
        ("ds_config.jsn", "path/to/file.py:Name or the path of a config"),
    ],
)
def test_a_wrong_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_spelling(name)


def test_what_is_built_in() -> None:
    assert is_built_in("ddp") and is_built_in("ddp+nothing+norm-local")
    assert not is_built_in("my.py:My+norm-local") and not is_built_in("my.py:My")


def test_those_of_extras_are_named_and_do_not_run_by_default() -> None:
    assert not set(OF_EXTRAS) & set(BUILT_IN)
    assert set(NAMED) == {*OF_EXTRAS, *BUILT_IN, *WITH_OPTIMIZERS}
    for name in OF_EXTRAS:
        check_spelling(f"{name}+gather-stale")
        assert is_built_in(name) and extra_of(name) == "deepspeed"
    assert modules_of(["my.py:My", "deepspeed1+norm-local", "deepspeed3"]) == [
        "zerocheck.adapters.deepspeed.stage12",
        "zerocheck.adapters.deepspeed.stage3",
    ]
    assert modules_of(["ddp+norm-local", "my.py:My", "fsdp1", "fsdp1-grad-op"]) == [
        "zerocheck.adapters.ddp.adapter",
        "zerocheck.adapters.fsdp1.adapter",
    ]


def test_a_deepspeed_config(tmp_path: Path) -> None:
    """It is of the family of its stage, whose listed issues are known in it, and the user's own."""
    path = tmp_path / "ds_config.json"
    name = f"{path}+gather-stale"
    check_spelling(name)
    assert is_config(name) and not is_config("my.json:My") and not is_config("deepspeed1")
    assert innermost(f"{name}+nothing") == str(path) and not is_built_in(str(path))
    assert modules_of([name, "deepspeed3"]) == [
        "zerocheck.adapters.deepspeed.configured_engine",
        "zerocheck.adapters.deepspeed.stage3",
    ]
    assert extra_of(str(path)) == "deepspeed"
    assert family(name) == (name, str(path))  # there is no such file
    path.write_text('{"zero_optimization": {"stage": 2}}')
    assert family(name) == (name, str(path), "deepspeed2")


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        (
            "titan.toml",
            '[job]\n[model]\nname = "llama3"\n[training]\nseq_len = 2048\n',
            "is a config of torchtitan, .* as a build function, .*docs/torchtitan.md",
        ),
        (
            "nanotron.yaml",
            "model: {}\nparallelism: {dp: 2}\ntokens: {sequence_length: 256}\n",
            "is a config of nanotron, .* as a build function",
        ),
        (
            # It has fields of TrainingArguments, and its optimizer is none of them.
            "axolotl.yaml",
            "base_model: a/b\nmicro_batch_size: 2\noptimizer: adamw_8bit\nlearning_rate: 0.1\n"
            "output_dir: out\n",
            "is a config of axolotl, .*run the file that `deepspeed` names",
        ),
        ("mine.toml", "[tool]\n", "is TOML, and zerocheck reads configs in JSON and YAML"),
        ("mine.toml", "[tool\n", "is not TOML: .*line 1"),
    ],
)
def test_a_config_that_is_known_and_not_read(
    tmp_path: Path, file: str, text: str, words: str
) -> None:
    path = tmp_path / file
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        check_config(str(path))


def test_every_injected_fault_is_there_and_in_the_catalogue_of_faults() -> None:
    for where in INJECTED.values():
        module, _, kind = where.partition(":")
        assert issubclass(getattr(import_module(module), kind), Injection)
    rows = injected_into("my.py:My")
    assert {row.injected for row in rows} == set(INJECTED) - {"nothing"}
    assert {row.where for row in rows} == {f"my.py:My+{row.injected}" for row in rows}
    assert {row.injected for row in FAULTS.values() if row.injected} == set(INJECTED) - {"nothing"}
    for row in FAULTS.values():
        if row.injected:
            assert row.where == row.name == f"{row.parent}+{row.injected}"
            assert row.parent in BUILT_IN
            check_spelling(row.where)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.19.8", None),
        ("0.17.5", "needs deepspeed<0.20,>=0.17.6, and 0.17.5 is installed; install it with: "),
        ("0.20.0", "needs deepspeed<0.20,>=0.17.6, and 0.20.0 is installed"),
    ],
)
def test_another_release_of_a_library_is_refused(
    version: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its partitions are read where some releases have them, and others have not."""
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(catalogue, "version", lambda name: version)
    found = missing("deepspeed")
    assert found == reason if reason is None else str(found).startswith(reason)
