"""Foreign text cannot reach a terminal or a report raw, fake a line or run in a shell."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import time
from pathlib import Path

import hand_made
import hand_made_faults
import msgspec
import pytest
import torch
from hostile.trials import ESCAPES, FAKED, POISON, assert_lines, assert_printable, refused, trial
from rich.text import Text
from safetensors.torch import save_file

import zerocheck
from zerocheck.attached import text as attached_text
from zerocheck.attached.record.ranks import Problem
from zerocheck.attached.text import stopped_text
from zerocheck.foreign_text import as_json, copyable, indented, one_line, printable, toml_of
from zerocheck.report import github
from zerocheck.report.console import new_console
from zerocheck.run.records.journal import encode
from zerocheck.run.records.tally import tally

PACKAGE = Path(zerocheck.__file__).parent


def poisoned(record: msgspec.Struct) -> msgspec.Struct:
    """The record with hostile text wherever its type takes any text."""
    kind = type(record)

    def visit(tree: object, above: object, key: object) -> None:
        if isinstance(tree, dict | list):
            for inner, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
                visit(value, tree, inner)
        elif isinstance(tree, str):
            above[key] = POISON  # type: ignore[index]
            try:
                msgspec.convert(plain, kind, strict=False)
            except msgspec.ValidationError:
                above[key] = tree  # type: ignore[index]

    plain = msgspec.json.decode(encode(record))
    visit(plain, {}, "")
    return msgspec.convert(plain, kind, strict=False)


def journal(path: Path, records: list[msgspec.Struct]) -> Path:
    path.write_bytes(b"".join(encode(poisoned(one)) + b"\n" for one in records))
    return path


def assert_reports(directory: Path) -> None:
    """Every report is printable, and no heading of Markdown is faked outside of a code block."""
    for path in directory.iterdir():
        text = path.read_text(encoding="utf-8")
        assert_printable(text)
        if path.suffix == ".md":
            text = "".join(re.split(r"^(`{3,}).*?^\1$", text, flags=re.M | re.S)[::2])
            assert_lines(text)
            outside = "".join(re.split(r"(`+).*?\1", text)[::2])
            assert "@team" not in outside and "#1" not in outside, outside[-2000:]


@pytest.mark.parametrize("name", ["failed", "known", "resumed", "stale"])
def test_a_journal(tmp_path: Path, name: str) -> None:
    """Every format of a report, and the console, of a journal whose every text is hostile."""
    records = getattr(hand_made, name)() if name != "stale" else hand_made.failed()
    if name == "stale":
        records[-1:-1] = [hand_made.stale()]
    result = trial("report", journal(tmp_path / "journal.ndjson", records), "--report-dir", "out")
    assert result.exit_code in (0, 1)
    assert_reports(tmp_path / "out")


def test_a_kill_matrix(tmp_path: Path) -> None:
    """The same of the journal of a kill matrix."""
    records = [hand_made_faults.started("gather-stale"), hand_made_faults.tried("gather-stale")]
    records.append(hand_made_faults.DONE)
    path = journal(tmp_path / "faults.ndjson", records)
    trial("report", path, "--report-dir", "out")
    assert_reports(tmp_path / "out")


def test_two_journals(tmp_path: Path) -> None:
    """The same of a comparison with an earlier run."""
    now = journal(tmp_path / "journal.ndjson", hand_made.failed())
    (tmp_path / "old").mkdir()
    journal(tmp_path / "old" / "journal.ndjson", hand_made.held())
    trial("report", now, "--against", "old", "--report-dir", "out")
    assert_reports(tmp_path / "out")


def test_annotations_of_github(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newline in a title cannot begin a workflow command of its own."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    for line in github.commands(tally([poisoned(one) for one in hand_made.failed()])):  # type: ignore[misc]
        assert "\n" not in line and line.startswith("::")
        assert_printable(line)


def test_names_in_a_checkpoint(tmp_path: Path) -> None:
    """An OSC sequence in the name of a tensor set the title of the terminal."""
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    save_file({f"a{POISON}": torch.ones(2), "b": torch.ones(1)}, good)
    save_file({f"a{POISON}": torch.tensor([1.0, torch.nan]), "b": torch.zeros(1)}, bad)
    assert trial("checkpoint", good).exit_code == 0
    result = trial("checkpoint", bad, "--json", "report.json")
    assert result.exit_code == 1 and "owned" in result.output
    assert_printable((tmp_path / "report.json").read_text())
    assert trial("checkpoint", good, bad).exit_code == 1


def test_values_in_a_checkpoint(tmp_path: Path) -> None:
    """Words in a state dict, keys with lone surrogates, and names of files."""
    name = tmp_path / f"of{ESCAPES.replace(chr(0), '')}\n{FAKED}.pt"
    torch.save({"model": {f"w\udc80{POISON}": torch.ones(1)}, POISON: POISON}, name)
    assert trial("checkpoint", name, "--json", "report.json").exit_code == 0
    torch.save({"model": {"w": torch.ones(1)}, POISON: f"{POISON}2"}, tmp_path / "other.pt")
    assert trial("checkpoint", name, tmp_path / "other.pt", "--json", "two.json").exit_code == 1
    for file in ("report.json", "two.json"):
        assert_printable((tmp_path / file).read_text())
    refused("checkpoint", tmp_path / f"{name.name}x")


@pytest.mark.parametrize("command", ["replay", "report", "checkpoint", "run", "memory", "faults"])
def test_arguments(command: str) -> None:
    """A file or a name that is not there is named in one printable line."""
    message = refused(command, f"no{ESCAPES.replace(chr(0), '')}\n{FAKED}\nerror: faked.json")
    assert "\nerror: faked" not in message


def test_a_case_file(tmp_path: Path) -> None:
    """What a case file says is quoted where it is refused."""
    path = tmp_path / "case.json"
    plain = {"case": {"mesh": [2]}, "implementation": POISON, POISON: 1}
    path.write_bytes(msgspec.json.encode(plain))
    refused("replay", path)
    path.write_bytes(msgspec.json.encode({"case": {POISON: 1}}))
    refused("replay", path)
    path.write_bytes(msgspec.json.encode({"case": {"mesh": POISON}}))
    refused("replay", path)


def test_the_console() -> None:
    """Text that nobody made printable before is so on the console, in styles and tables too."""
    file = io.StringIO()
    console = new_console(file=file, force_terminal=True, color_system="standard", width=80)
    console.print(Text(f"a{ESCAPES}", style="bold"), end="")
    kept = ESCAPES.replace("\r", "").replace("\x07", "")  # rich itself leaves these out
    assert file.getvalue() == f"\x1b[1ma{printable(kept)}\x1b[0m"


def test_lines_of_an_attached_run(capsys: pytest.CaptureFixture[str]) -> None:
    """What `attach` prints about a problem of a rank, into the output of a training."""
    attached_text.say(stopped_text(3, Problem(1, POISON)))
    message = capsys.readouterr().err
    assert "owned" in message
    assert_lines(message)


@pytest.mark.parametrize(
    "word",
    [
        "plain", "two words", "it's", "$(touch owned)", "`touch owned`", "a;touch owned", "-x",
        "*", "~", "a\nb", "\x1b]0;x\x07", "tab\there", "\\", "'\n\\'", "ä\n", "\n7", "", "!!\n",
        "$HOME\n",
    ],
)  # fmt: skip
def test_commands_to_copy(tmp_path: Path, word: str) -> None:
    """A shell reads back what was quoted, executes nothing, and the command is one line."""
    line = copyable(["printf", "%s", word])
    assert line.isprintable()
    output = subprocess.run(["bash", "-c", line], capture_output=True, cwd=tmp_path, check=True)
    assert output.stdout.decode() == word
    assert not (tmp_path / "owned").exists()


def test_further_lines_are_indented() -> None:
    assert indented("a\nerror: b\n  c") == "a\n  error: b\n    c"
    assert one_line(f"a\n{FAKED}") == "a replay zerocheck replay evil"


def test_commands_of_a_runner_are_text() -> None:
    text = "a ::b::\n::error::c\n \t::add-mask::d ##[group]e\nf.py::test"
    assert printable(text) == "a ::b::\n: :error::c\n \t: :add-mask::d ## [group]e\nf.py::test"


def test_json_holds_the_same() -> None:
    """Escapes of JSON lose nothing; what UTF-8 cannot hold is told as text."""
    data = as_json({POISON: [POISON, "\U000e0001", "\udc80"]})
    assert_printable(data.decode())
    assert msgspec.json.decode(data) == {POISON: [POISON, "\U000e0001", "\\udc80"]}


PRINTING = {"cli/output.py", "report/progress.py", "attached/text.py", "pytest_plugin.py"}
"""Files that write to a terminal; each makes printable what it writes."""


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_nothing_else_prints(path: Path) -> None:
    """`print`, `click.echo` and consoles of rich are in few files, which make text printable."""
    if path.relative_to(PACKAGE).as_posix() in PRINTING:
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in ("print", "click.echo", "click.secho", "Console"), node.lineno


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a." * 20_000 + "b = 1", "a key has more than 100 parts"),
        ("x = {" + "a . " * 200 + "b = 1}", "a key has more than 100 parts"),
        ("x = " + "[" * 20_000, "nested too deeply"),
        ("x = " + "9" * 20_000, "Exceeds the limit"),
    ],
)
def test_toml_is_read_in_little_time(text: str, words: str) -> None:
    """tomllib takes a minute for a key of 50,000 parts."""
    began = time.perf_counter()
    with pytest.raises(ValueError, match=words):
        toml_of(text)
    assert time.perf_counter() - began < 5


def test_usual_toml_is_read() -> None:
    text = "[a.b]\nc.d = [" + "0.5, " * 500 + "]\ne = '" + "a.b " * 300 + "'"
    assert toml_of(text)["a"]["b"]["c"]["d"] == [0.5] * 500
