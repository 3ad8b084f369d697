"""Test that verify reports damage of an object before a later format of it."""

from __future__ import annotations

import pytest

from nearkin_maintenance.verify.verifier import _Findings
from nearkin_shared.errors import Corrupt, FormatTooNew

TOO_NEW = FormatTooNew("c: format 99")
DAMAGED = Corrupt("c: its checksum does not agree")


@pytest.mark.parametrize("problems", [(TOO_NEW, DAMAGED), (DAMAGED, TOO_NEW), (TOO_NEW, str(DAMAGED))])
def test_findings_with_damage_and_later_format_report_damage(
    problems: tuple[FormatTooNew | Corrupt | str, ...],
) -> None:
    """Else `nearkin verify` would end with the code of a later format, and no repair would be made."""
    findings = _Findings()
    for problem in problems:
        findings.add("c", problem, ("default", "key", 1))
    (found,) = findings.damage("default")
    assert (found.problem, found.is_too_new, found.versions) == (str(DAMAGED), False, (("key", 1),))


def test_findings_with_a_later_format_alone_report_it() -> None:
    findings = _Findings()
    findings.add("c", TOO_NEW)
    findings.add("c", str(TOO_NEW), is_too_new=True)
    (found,) = findings.damage("default")
    assert (found.problem, found.is_too_new) == (str(TOO_NEW), True)
