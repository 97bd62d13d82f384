"""From names to the user's code: one file is one module, whoever names it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

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
    check_file(f"{folder / 'my_sharding.py'}:build")  # nothing is imported
    for check in (check_file, import_user_code):
        with pytest.raises(UsageError) as refused:
            check(f"{folder / 'my_shardign.py'}:build")
        assert f"did you mean '{folder / 'my_sharding.py'}'?" in str(refused.value)
        assert f"(looked at {folder / 'my_shardign.py'})" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        # Files that only end alike are not near.
        ("trainer.py:f", "there is no file 'trainer.py' (looked at "),
        ("their_modle.py:f", "there is no file 'their_modle.py'; did you mean 'their_model.py'?"),
        ("pgk/shard.py:f", "there is no folder '{folder}/pgk'; did you mean 'pkg'?"),
        ("a/b/c.py:f", "there is no file 'a/b/c.py': there is no folder '{folder}/a'"),
        ("pkg.py:f", "there is no file 'pkg.py' (looked at "),
        ("pkg/shard:f", "there is no module 'pkg/shard', neither in the current directory nor"),
        ("pkg/shard:f", "; did you mean 'pkg/shard.py:f'?"),
        ("pkgg.shard:f", "there is no module 'pkgg.shard', neither in the current directory nor"),
        ("pkgg.shard:f", "; did you mean 'pkg.shard:f'?"),
        ("plain/:f", "'plain/' is a folder: name a file in it, plain/FILE.py:f"),
        (
            "__main__:f",
            "'__main__:f' is of a notebook or a script that ran, and is not here; put it",
        ),
    ],
)
def test_what_is_not_there_is_said_at_once(package: Path, name: str, message: str) -> None:
    """Before rank processes start."""
    with pytest.raises(UsageError) as refused:
        check_file(name)
    assert message.format(folder=package) in str(refused.value)


def test_a_missing_name_says_which_are_there(package: Path) -> None:
    for name, message in (
        ("their_model.py:Layr", "their_model.py has no 'Layr'; did you mean 'Layer'?"),
        ("their_model.py:build", "their_model.py has no 'build'; it defines Layer"),
        ("pkg.shrad:f", "No module named 'pkg.shrad'; did you mean 'pkg.shard:f'?"),
        ("plain:f", "plain has no 'f'; 'plain' is a folder: name a file in it, plain/FILE.py:f"),
    ):
        with pytest.raises(UsageError) as refused:
            import_user_code(name)
        assert message in str(refused.value)


@pytest.fixture
def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder as the current directory, with `pkg.shard`, and `plain.shard` without __init__."""
    for name in ("pkg", "plain"):
        (folder / name).mkdir()
        (folder / name / "shard.py").write_text("from .model import Layer\nf = Layer\n")
        (folder / name / "model.py").write_text("class Layer:\n    pass\n")
    (folder / "pkg" / "__init__.py").write_text("")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return folder


@pytest.mark.parametrize("name", ["pkg.shard:f", "pkg/shard.py:f", "plain/shard.py:f"])
def test_a_file_of_a_package_is_imported_as_its_module(package: Path, name: str) -> None:
    package_name = name[: name.index("g") + 1] if name.startswith("pkg") else "plain"
    layer = import_user_code(name)
    assert layer.__module__ == f"{package_name}.model"
    assert import_user_code(f"{package_name}/model.py:Layer") is layer
    assert import_user_code(f"{package_name}.model:Layer") is layer


def test_modules_of_the_current_directory_come_last(package: Path) -> None:
    """Nothing that is installed, or of the standard library, changes its meaning."""
    for name in ("their_model", "tabulate", "imaplib"):
        (package / f"{name}.py").write_text("here = True\n")
    assert import_user_code("their_model:here")
    assert sys.path[-1] == str(package)
    assert import_user_code("tabulate.py:here")


@pytest.mark.parametrize("name", ["pkg.shard", "tabulate"])
def test_a_module_that_is_installed_and_in_the_current_directory(package: Path, name: str) -> None:
    """None of the two is taken silently: a run would judge another file than the reader edits."""
    here, there = package / "here", package / "there"
    for folder in (here, there):
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"f = {folder.name!r}\n")
        if path.parent != folder:
            (path.parent / "__init__.py").write_text("")
    sys.modules.pop("tabulate", None)
    installed = next(entry for entry in sys.path if entry.endswith("site-packages"))
    sys.path.insert(sys.path.index(installed), str(there))
    file = f"{name.replace('.', '/')}.py"
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(here)
        for refused in (check_file, import_user_code):
            with pytest.raises(UsageError) as ambiguous:
                refused(f"{name}:f")
            assert str(ambiguous.value) == (
                f"{name} is ambiguous: Python imports {there / file}, and the current directory "
                f"has {file}; name the file that you mean, {file}:f or {there / file}:f"
            )
        patched.chdir(there)
        assert import_user_code(f"{name}:f") == "there"
        for module in (name, name.partition(".")[0]):
            sys.modules.pop(module, None)
        patched.chdir(here)
        assert import_user_code(f"{file}:f") == "here"


def test_files_beside_a_named_file_come_before_what_is_installed(package: Path) -> None:
    """As for `python file.py`, but behind the standard library."""
    other = package / "other"
    other.mkdir()
    for name in ("filelock", "imaplib"):
        (other / f"{name}.py").write_text("here = True\n")
    for name in ("filelock", "imaplib"):
        sys.modules.pop(name, None)
    (other / "uses.py").write_text("import filelock\nimport imaplib\n")
    assert import_user_code("other/uses.py:filelock").here
    assert not hasattr(import_user_code("other/uses.py:imaplib"), "here")


def test_a_package_of_that_name_elsewhere_is_named(package: Path) -> None:
    other = package / "other"
    (other / "pkg").mkdir(parents=True)
    (other / "pkg" / "__init__.py").write_text("")
    (other / "pkg" / "own.py").write_text("f = 1\n")
    assert import_user_code("pkg/shard.py:f")
    message = (
        f"other/pkg/own.py is the module pkg.own, but Python finds another 'pkg', in {package}/pkg"
    )
    with pytest.raises(UsageError) as refused:
        import_user_code("other/pkg/own.py:f")
    assert message in str(refused.value)


def test_a_module_that_changed_is_imported_anew(package: Path) -> None:
    assert import_user_code("their_model:Layer").__name__ == "Layer"
    (package / "their_model.py").write_text("Layer = 3\n")
    assert import_user_code("their_model:Layer") == 3


TRAINS = """import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight])
weight.sum().backward()
optimizer.step()
"""
UNDER_MAIN = '; put what it runs under `if __name__ == "__main__":`'
PARSES = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", required=True)
parser.parse_args([])
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            PARSES,
            f"it parses command-line arguments (line 4), and gets none of its own{UNDER_MAIN}",
        ),
        (
            "import sys\nsys.exit(3)\n",
            f"it ends the process, as by sys.exit(3) (line 2){UNDER_MAIN}",
        ),
        (TRAINS, f"it takes an optimizer step (line 5), as a training script does{UNDER_MAIN}"),
        ("raise SystemExit\n", f"it ends the process, as by sys.exit() (line 1){UNDER_MAIN}"),
        (
            "open('/no/data')\n",
            "No such file or directory: '/no/data' (line 1); if that is a script, put what it runs",
        ),
        ("def f(:\n", "it.py does not import: SyntaxError: "),
        ("def f():\nx = 1\n", "does not import: IndentationError: expected an indented block"),
        ("import faulty\n", "SyntaxError: invalid syntax (faulty.py, line 2)"),
        ("import failing\n", "NameError: name 'undefined' is not defined (failing.py, line 2)"),
        (
            "import no_such_library\n",
            f"No module named 'no_such_library' (line 1); install it where zerocheck runs, in "
            f"{sys.prefix}",
        ),
        ("import their_model\n", "their_model is in {folder}: run zerocheck there"),
        (
            "from .outer import x\n",
            "top-level package (outer.py, line 1); name it from the folder above its package",
        ),
    ],
)
def test_each_failure_is_one_sentence(folder: Path, text: str, message: str) -> None:
    sub = folder / "sub"
    sub.mkdir()
    (sub / "faulty.py").write_text("\nx =\n")
    (sub / "failing.py").write_text("\nundefined\n")
    (sub / "outer.py").write_text("from ..x import x\n")
    (sub / "it.py").write_text(text)
    with pytest.raises(UsageError) as refused:
        import_user_code(f"{sub / 'it.py'}:f")
    said = str(refused.value)
    assert f"{sub / 'it.py'} does not import: " in said and "\n" not in said
    assert message.format(folder=folder) in said


def test_an_interrupt_is_no_failure_of_an_import(folder: Path) -> None:
    (folder / "it.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        import_user_code(f"{folder / 'it.py'}:f")


def test_a_deepspeed_config_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"gradient_cliping": 1.0}')
    with pytest.raises(UsageError, match="did you mean 'gradient_clipping'"):
        check_file(str(path))
    path.write_text('{"gradient_clipping": 1.0}')
    check_file(str(path))


def test_the_default_dtype_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of a case was filled without end, and then sums had two dtypes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wide.py").write_text(
        "import torch\ntorch.set_default_dtype(torch.float64)\ndef build(): ...\n"
    )
    import_user_code("wide.py:build")
    assert torch.get_default_dtype() == torch.float32
