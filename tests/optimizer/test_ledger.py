"""The ledger: one canonical line per event, chained, durable, and loud about every kind of damage."""

from __future__ import annotations

import json

import pytest

from optimizer.ledger import FIRST, Ledger, LedgerBroken, canonical, line_hash


@pytest.fixture
def ledger(tmp_path):
    found = Ledger(tmp_path / "ledger.jsonl", now=lambda: "2026-01-01T00:00:00.000+00:00")
    for number in range(3):
        found.append("budget", number or None, {"n": number, "text": "größer\n"})
    found.close()
    return found


def test_lines_are_canonical_chained_and_numbered(ledger):
    rows = ledger.path.read_bytes().splitlines()
    lines = [json.loads(row) for row in rows]
    assert [canonical(line) for line in lines] == rows
    assert [line["seq"] for line in lines] == [0, 1, 2]
    assert lines[0]["prev"] == FIRST
    assert all(line["hash"] == line_hash(line) for line in lines)
    assert [line["prev"] for line in lines[1:]] == [line["hash"] for line in lines[:-1]]
    assert list(lines[0]) == sorted(lines[0])


def test_every_line_names_seal_sandbox_environment_and_incumbent(ledger):
    ledger.context.gates_digest, ledger.context.sandbox_level = "d", "bwrap"
    ledger.context.env_hash, ledger.context.incumbent_commit = "e", "c"
    line = ledger.append("budget", None, {})
    assert (line["gates_digest"], line["sandbox_level"], line["env_hash"], line["incumbent_commit"]) == ("d", "bwrap", "e", "c")


def test_a_torn_last_line_is_ignored_by_readers_and_dropped_by_the_next_writer(ledger):
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + b'{"attempt":null,"da')
    again = Ledger(ledger.path)
    assert len(again.lines()) == 3
    assert "torn" in again.verify()[0]
    assert ledger.path.read_bytes() != whole, "reading must not change the file"
    again.append("budget", None, {})
    assert Ledger(ledger.path).verify() == []
    assert len(Ledger(ledger.path).lines()) == 4


@pytest.mark.parametrize("damage", ["value", "order", "gone", "text", "space"])
def test_damage_before_the_end_is_named_with_its_line(ledger, damage):
    rows = ledger.path.read_bytes().splitlines()
    if damage == "value":
        rows[1] = rows[1].replace(b'"n":1', b'"n":7')
    elif damage == "order":
        rows[0], rows[1] = rows[1], rows[0]
    elif damage == "gone":
        del rows[1]
    elif damage == "text":
        rows[1] = b"\xff not json"
    else:
        rows[1] = rows[1].replace(b'"seq":1', b'"seq": 1')
    ledger.path.write_bytes(b"\n".join(rows) + b"\n")
    with pytest.raises(LedgerBroken, match=r"line [12]"):
        Ledger(ledger.path)


def test_a_full_disk_leaves_no_half_line(ledger, monkeypatch):
    before = ledger.path.read_bytes()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        ledger.append("budget", None, {})
    monkeypatch.undo()
    assert ledger.path.read_bytes() == before
    ledger.append("budget", None, {})
    assert ledger.verify() == []


def test_unknown_kinds_and_missing_fields_are_refused(ledger):
    with pytest.raises(ValueError, match="valid:"):
        ledger.append("guess", None, {})
    with pytest.raises(ValueError, match="lacks detail"):
        ledger.append("rejected", 1, {"stage": "quick", "reason": "scope"})


def test_text_that_is_not_unicode_and_numbers_that_are_none_do_not_break_the_chain(ledger):
    ledger.append("rejected", 1, {"stage": "quick", "reason": "boot", "detail": "bad \udc80 byte"})
    assert Ledger(ledger.path).lines()[-1]["data"]["detail"] == "bad ? byte"
    with pytest.raises(ValueError, match="JSON"):
        ledger.append("budget", None, {"x": float("nan")})
    assert Ledger(ledger.path).verify() == []
