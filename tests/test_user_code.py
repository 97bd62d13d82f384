"""From names to the user's code: one file is one module, whoever names it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerocheck.errors import UsageError
from zerocheck.user_code import check_file, import_user_code


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """What is import_user_code from it is forgotten."""
    before, path = set(sys.modules), list(sys.path)
    (tmp_path / "their_model.py").write_text("class Layer:\n    pass\n")
    (tmp_path / "their_sharder.py").write_text("from their_model import Layer\nshards = Layer\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.path[:] = path


@pytest.mark.parametrize("order", [("model", "sharder"), ("sharder", "model")])
def test_a_sharder_gets_the_classes_of_the_model(folder: Path, order: tuple[str, str]) -> None:
    names = {"model": "their_model.py:Layer", "sharder": "their_sharder.py:shards"}
    first, second = (import_user_code(f"{folder / names[one]}") for one in order)
    assert first is second


def test_a_file_that_changed_is_imported_anew(folder: Path) -> None:
    path = folder / "their_model.py"
    assert import_user_code(f"{path}:Layer").__name__ == "Layer"
    path.write_text("def Layer():\n    return 3\n")
    assert import_user_code(f"{path}:Layer")() == 3


def test_files_of_one_name_in_two_folders(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    (other / "their_model.py").write_text("Layer = 5\n")
    assert import_user_code(f"{folder / 'their_model.py'}:Layer").__name__ == "Layer"
    assert import_user_code(f"{other / 'their_model.py'}:Layer") == 5


def test_a_file_that_fails_can_be_mended(folder: Path) -> None:
    path = folder / "broken.py"
    path.write_text("value = 1 / 0\n")
    with pytest.raises(UsageError, match=r"ZeroDivisionError: .* \(line 1\)"):
        import_user_code(f"{path}:value")
    assert "broken" not in sys.modules
    path.write_text("value = 1\n")
    assert import_user_code(f"{path}:value") == 1


def test_a_file_that_is_not_there_names_the_nearest(folder: Path) -> None:
    (folder / "my_sharding.py").write_text("raise SystemExit\n")
    check_file(f"{folder / 'my_sharding.py'}:build")  # nothing is import_user_code
    check_file("no.such.module:build")
    for check in (check_file, import_user_code):
        with pytest.raises(UsageError, match=r"did you mean 'my_sharding\.py'") as refused:
            check(f"{folder / 'my_shardign.py'}:build")
        assert f"(looked at {folder / 'my_shardign.py'})" in str(refused.value)
    with pytest.raises(UsageError, match="there is no file"):
        check_file("no/such/folder/a.py:build")


def test_a_deepspeed_config_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"gradient_cliping": 1.0}')
    with pytest.raises(UsageError, match="did you mean 'gradient_clipping'"):
        check_file(str(path))
    path.write_text('{"gradient_clipping": 1.0}')
    check_file(str(path))
