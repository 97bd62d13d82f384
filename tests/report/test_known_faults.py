"""Known faults: the findings of one fault together, the most severe first, in one sentence."""

from __future__ import annotations

from collections import Counter

from hand_made import KNOWN, case, finding, finished, started
from msgspec.structs import replace

from zerocheck.report.html.faults import fault_views
from zerocheck.report.known_faults import SEVERITIES, faults_sentence, known_faults
from zerocheck.run.known_issues.entries import ours
from zerocheck.run.records.tally import Tally, tally

CRASH = replace(KNOWN, fingerprint="fsdp2 / crashed / RuntimeError", page="b.md", avoid="Do not.")
PEAK = replace(KNOWN, fingerprint="fsdp2 / peak / working", page="c.md", source="ours, entry 1")


def run() -> Tally:
    of_two = replace(KNOWN, features=("world-2", "clip"))
    return tally(
        [
            started("zero2", "fsdp2"),
            case(0),
            finding(known=PEAK, obligation="peak", implementation="fsdp2"),
            finding(number=1, known=CRASH, obligation=None, status="crashed"),
            finding(number=2, known=of_two, cases=3),
            finding(number=3, known=KNOWN, implementation="fsdp2", obligation="roundtrip"),
            finding(number=4),
            finished(0),
        ]
    )


def test_findings_of_one_fault_stand_together() -> None:
    worst, crash, peak = known_faults(run())
    assert [SEVERITIES[one.severity].partition(":")[0] for one in (worst, crash, peak)] == [
        "silent",
        "crash, hang or refusal",
        "memory and communication",
    ]
    assert worst.cases == Counter(zero2=3, fsdp2=1)
    assert worst.obligations == ["gradient", "roundtrip"]
    assert worst.conditions == ["2 ranks, gradient clipping"]
    assert worst.links == ["https://example.org/7"]
    assert crash.obligations == ["crashed"] and crash.known.avoid == "Do not."


def test_an_older_journal_has_the_advice_of_today() -> None:
    entry = next(one for one in ours() if one.features)
    older = replace(entry.record, avoid="", features=())
    (fault,) = known_faults(tally([started(), finding(known=older)]))
    assert fault.known == entry.record and fault.conditions
    foreign = replace(older, source="known.toml, entry 1")
    (fault,) = known_faults(tally([started(), finding(known=foreign)]))
    assert fault.known == foreign and not fault.conditions


def test_a_refused_checkpoint_is_no_silent_fault() -> None:
    refused = replace(KNOWN, fingerprint="zero2 / roundtrip / checkpoint / refused")
    counted = tally([started(), finding(known=refused, obligation="roundtrip")])
    assert faults_sentence(counted) == "1 known issue reproduced"


def test_the_sentence_names_libraries_where_all_entries_are_ours() -> None:
    assert faults_sentence(run()) == "3 known issues reproduced (1 silent)"
    ours = replace(KNOWN, source="ours, entry 2")
    counted = tally(
        [
            started(),
            finding(known=ours),
            finding(number=1, known=replace(ours, page="b.md"), implementation="deepspeed1"),
        ]
    )
    torch = counted.started.environment.torch if counted.started else ""
    sentence = faults_sentence(counted)
    assert sentence.startswith(f"2 known issues of torch {torch.partition('+')[0]} and DeepSpeed")
    assert sentence.endswith("reproduced (2 silent)")
    assert faults_sentence(tally([started(), finding()])) == ""


def test_a_fault_that_one_case_showed_is_said_to_need_nothing() -> None:
    """Its features are those of that case, and which of them it needs is not known."""
    of_two = replace(KNOWN, features=("world-2", "clip"))
    once = tally([started(), finding(known=of_two), finished(0)])
    often = tally([started(), finding(known=of_two, cases=2), finished(0)])
    ((label, words),) = [fact for fact in fault_views(once)[0].facts if "2 ranks" in fact[1]]
    assert (label, words) == ("seen once, with", "2 ranks, gradient clipping")
    assert ("needs", words) in fault_views(often)[0].facts
