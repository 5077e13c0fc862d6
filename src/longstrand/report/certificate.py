"""The section about the certificate: what was compared before or beside the run, and how it ended."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longstrand.errors import UserError
from longstrand.report.tables import table
from longstrand.series import is_number

FIELDS = {"passed": bool, "subject": str, "checks": list, "not_checked": str}
TEXTS = ("check", "settings", "group")


def check_certificate(path: Path, found: Any) -> Any:
    """The value of a certificate.json, which `longstrand certify` has written; None where there is none.

    Raises:
        UserError: it has another form.
    """
    if found is None:
        return None
    whole = isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in FIELDS.items())
    if not whole or not all(_is_check(each) for each in found["checks"]):
        raise UserError(f"{path}: not a certificate as `longstrand certify` writes it; run it again")
    return found


def certificate_html(found: Mapping[str, Any] | None) -> str:
    """A sentence, the table and what was not checked; empty without a certificate."""
    if found is None:
        return ""
    checks = found["checks"]
    failed = [each for each in checks if not each["passed"]]
    verdict = (
        f"\u2717 {len(failed)} of {len(checks)} checks failed; the first: {failed[0]['check']} "
        f"({failed[0]['settings']}), {failed[0]['where']}."
        if failed
        else f"\u2713 All {len(checks)} checks passed."
    )
    rows = [_row(each) for each in checks]
    head = ["check", "settings", "loss", "log-probabilities", "worst gradient", "of", "verdict"]
    caption = "Largest relative differences between two ways to compute the same step."
    return (
        f"<p>{html.escape(verdict)} {html.escape(_sentence(found['subject']))}</p>"
        + table(head, rows, numeric_from=len(head), caption=caption)
        + f'<p class="aside">Not checked: {html.escape(found["not_checked"])}.</p>'
    )


def _row(check: Mapping[str, Any]) -> list[str]:
    same = "the same bits" if check["limit"] == 0 else f"equal to {check['limit']:g}"
    return [
        check["check"],
        check["settings"],
        *(_small(check[key]) for key in ("loss", "logprobs", "gradient")),
        check["group"],
        same if check["passed"] else f"differs: {check['where']}",
    ]


def _is_check(check: Any) -> bool:
    return (
        isinstance(check, dict)
        and isinstance(check.get("passed"), bool)
        and (check["passed"] or isinstance(check.get("where"), str))
        and all(isinstance(check.get(key), str) for key in TEXTS)
        and is_number(check.get("limit"))
        and all(_is_measured(check.get(key)) for key in ("loss", "gradient"))
        and (check.get("logprobs") is None or _is_measured(check["logprobs"]))
    )


def _is_measured(value: Any) -> bool:
    """A number; certify writes what is none or infinite as text."""
    return is_number(value) or value in ("nan", "inf")


def _small(value: Any) -> str:
    if value is None:
        return "\u2013"
    if isinstance(value, str):
        return "not finite"
    return "0" if value == 0 else f"{value:.1e}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
