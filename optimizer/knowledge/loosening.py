"""Advice that would loosen a gate: knowledge of that kind is refused always, whoever wrote it.

Looks for a loosening word near the name of something that judges, either way round, in English and Chinese, and for
patches that touch what judges. `gate` as one of an MLP's projections is no judge. Not for: other contradictions (check.py).
"""

from __future__ import annotations

import re

_DO = (
    r"relax|loosen|lower|rais|widen|skip|disabl|bypass|ignor|weaken|remov|drop|increas|reduc|decreas|soften|circumvent|suppress|"
    r"waiv|exempt|overrid|shorten|enlarg|comment(?:s|ed|ing)? out|turn(?:s|ed|ing)? off|switch(?:es|ed|ing)? off|trick|fool"
)
_MLP = r"(?![ _-]*(?:proj|up\b|and up|product|weight|matrix|branch|activation|linear|value|input|output|tensor|half|\*))"
_JUDGE = (
    rf"(?:gates?\b{_MLP}|oracle|tolerances?|atol|rtol|seal|sandbox|non-?inferiority|acceptance|correctness (?:check|test)s?|"
    r"greedy (?:check|test|match)\w*|token accounting|significance|alpha level|verification)"
)
_MEASURE = r"(?:margins?|bands?|thresholds?|floors?|limits?|bars?)"  # judge only where the sentence is about judging
_ABOUT = re.compile(r"gate\b|accept|accura|correct|throughput|toleran|oracle|logit|verdict|decision|regression|judg|tok/s|noise|baseline|门|验收|精度", re.I)
_DONE = r"(?:relaxed|loosened|lowered|raised|widened|skipped|disabled|bypassed|ignored|weakened|removed|dropped|increased|reduced|off|optional|waived|overridden|unnecessary)"
_VERB = re.compile(rf"\b(?:{_DO})\w*\s+(?:[\w'-]+\s+){{0,4}}?({_JUDGE}|{_MEASURE}\b)", re.I)
_PASSIVE = re.compile(rf"\b({_JUDGE}|{_MEASURE})\s+(?:[\w'./%-]+\s+){{0,5}}?(?:is|are|be|get|gets|turned|switched)\s+(?:\w+\s+)?{_DONE}\b", re.I)
_APART = re.compile(rf"\b(?:turn|switch|leave|keep|comment)\s+(?:\w+\s+){{0,3}}?({_JUDGE})\s+(?:off|out)\b|\bwithout\s+(?:\w+\s+){{0,2}}?({_JUDGE})", re.I)
_CHINESE = re.compile(r"(?:放宽|放松|降低|提高|调高|调低|跳过|关闭|禁用|绕过|忽略|移除|取消|去掉)[^,，。;；]{0,10}?(?:门禁|关卡|容差|误差|阈值|校验|验证|沙箱|门槛|下限|验收|gate|oracle|tolerance)", re.I)
_NOT = re.compile(r"\b(?:never|not|n't|no need to|must not|cannot|instead of|rather than|refus\w+|forbid\w*|forbidden to)\W+(?:\w+\W+){0,3}$|(?:禁止|不得|不要|不应|不能|不可|严禁|不允许)[^,，。;；]{0,4}$", re.I)
_JUDGES = re.compile(r"^(?:\+\+\+|---) [ab]/(optimizer/(?:gates|confine|truth|traffic)/\S+|optimizer/(?:accept|measure|rules|guards|seal|judge|verify)\.py)", re.M)


def loosens(text: str) -> str | None:
    """The words that would loosen a gate, or None. Advice against it is none."""
    for sentence in re.split(r"(?<=[.;!?])\s+|[。；\n]", text):
        for pattern in (_VERB, _PASSIVE, _APART, _CHINESE):
            for match in pattern.finditer(sentence):
                named = next((g for g in match.groups() if g), "") if match.groups() else ""
                if re.fullmatch(_MEASURE, named, re.I) and not _ABOUT.search(sentence):
                    continue
                if not _NOT.search(sentence[: match.start()]):
                    return match[0].strip()
    return None


def touches(patch: str | None) -> str | None:
    """A file of the judging side that a patch would change, or None."""
    match = _JUDGES.search(patch or "")
    return match[1] if match else None
