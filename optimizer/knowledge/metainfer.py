"""Import and export of the MetaInfer `inference_blueprint.json` shape, field by field.

The nodes `performance_optimization` (O1, O2 ...) and `failure_mode_library.entries` become entries with status
`imported`; accepted entries go back as further O-nodes with the six fields that existing agents read, and ours
beneath. Not for: finding its contradictions (prose.py), or accepting anything (review/).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

from optimizer.knowledge.blueprint import (
    Audit,
    BlueprintError,
    Detection,
    Entry,
    Gain,
    Legacy,
    Scope,
    SourceRef,
    Status,
)

PERFORMANCE = ("framework_layer", "data_flow_contracts", "tp_layer_interface_contracts", "performance_optimization")
FAILURES = ("model_layer", "architecture_knowledge_base", "failure_mode_library")
_MECHANISMS = (  # the first whose pattern is in the node's key or rule
    (r"inference.?mode|no_grad", "inference-mode"),
    (r"item|sync|tolist", "remove-host-reads"),
    (r"prealloc|empty_like|register_buffer", "preallocate-decode-buffers"),
    (r"block_table|arange|slot", "static-decode-metadata"),
    (r"kv.*(assign|write)|index_copy", "direct-kv-write"),
    (r"graph", "cuda-graph-capture"),
    (r"compile", "compile-regions"),
    (r"all.?reduce|custom.?ar|communicat", "custom-all-reduce"),
    (r"norm|fused|silu|rotary", "fused-kernels"),
    (r"merge|qkv|gate.*up", "merge-projections"),
)
_NODE = re.compile(r"^[OoPp]\d+_\w+$")
_AUDIT = re.compile(r"grep\s+(?:-\w+\s+)*(?:'([^']+)'|\"([^\"]+)\"|(\S+))\s+(\S+)")
_HITS = re.compile(  # "0 hits", "-> 0", "must return at least 2", "结果为 0", "0 处"
    r"(?:->|→|==|=|\b(?:returns?|must be|should be|expect(?:ed|s)?|gives?)\b|结果|命中|应为|为)\s*(?P<least_a>>=|≥|at least|至少|不少于)?\s*(?P<a>\d+)"
    r"|(?P<least_b>>=|≥|at least|至少|不少于)?\s*(?P<b>\d+)\s*(?:decorator\s+)?(?:hits?|matches|occurrences|lines|次|处|个)",
    re.I,
)


def find(data: Mapping[str, Any], path: Iterable[str]) -> Any:
    """The node at a path, or None."""
    node: Any = data
    for name in path:
        if not isinstance(node, Mapping) or name not in node:
            return None
        node = node[name]
    return node


def import_entries(data: Mapping[str, Any], source: SourceRef | None = None) -> list[Entry]:
    """Entries of a MetaInfer blueprint, all `imported`, scope unknown: a person has to state it.

    Raises BlueprintError when neither node is there, or one is not of the known shape.
    """
    if find(data, PERFORMANCE) is None and find(data, FAILURES) is None:
        raise BlueprintError(f"neither {'.'.join(PERFORMANCE)} nor {'.'.join(FAILURES)} is there")
    performance, failures = find(data, PERFORMANCE) or {}, find(data, FAILURES) or {}
    refs = [source] if source else []
    found: list[Entry] = []
    for key, node in performance.items():
        if _NODE.match(key):
            if not isinstance(node, Mapping) or "rule" not in node:
                raise BlueprintError(f"{'.'.join(PERFORMANCE)}.{key}: not an object with a `rule`")
            found.append(_rule(key, node, refs, performance.get("verified_by")))
    for node in failures.get("entries", []):
        if not isinstance(node, Mapping) or not {"id", "symptom", "fix"} <= set(node):
            raise BlueprintError(f"{'.'.join(FAILURES)}.entries: an entry lacks id, symptom or fix")
        found.append(_failure(node, refs))
    return found


def _rule(key: str, node: Mapping[str, Any], refs: list[SourceRef], verified_by: object) -> Entry:
    mechanism = _mechanism(f"{key} {node['rule']}")
    audit_text = node.get("audit_check")
    return Entry(
        id=f"metainfer.{key}",
        topic=mechanism,
        mechanism=mechanism,
        title=key.partition("_")[2].replace("_", " "),
        rule=str(node["rule"]),
        why=str(node.get("why", "")),
        detection=Detection(signature=str(node.get("detection", {}).get("signature", "")) or key),
        scope=Scope(**{k: v if isinstance(v, list) else [v] for k, v in node.get("scope", {}).items() if k in Scope.model_fields}),
        preconditions=list(node.get("preconditions", [])),
        conflicts_with=list(node.get("conflicts_with", [])),
        supersedes=list(node.get("supersedes", [])),
        audit=[a] if (a := parse_audit(str(audit_text or ""))) else [],
        source_refs=refs,
        legacy=Legacy(
            key=key,
            priority=node.get("priority"),
            real_engine=_text(node.get("real_engine")),
            apply_to=[str(x) for x in node.get("apply_to", [])],
            audit_check=_text(audit_text),
            verified_by=_text(node.get("verified_by", verified_by)),
        ),
        status=Status.IMPORTED,
    )


def _failure(node: Mapping[str, Any], refs: list[SourceRef]) -> Entry:
    return Entry(
        id=f"metainfer.{node['id']}",
        topic="failure-modes",
        mechanism=_mechanism(f"{node.get('category', '')} {node['fix']}"),
        title=str(node.get("category", node["id"])),
        rule=str(node["fix"]),
        why=str(node["symptom"]),
        detection=Detection(signature=str(node["symptom"])),
        scope=Scope(),
        source_refs=refs,
        legacy=Legacy(key=str(node["id"]), audit_check=_text(node.get("check"))),
        status=Status.IMPORTED,
    )


def _mechanism(text: str) -> str:
    return next((name for pattern, name in _MECHANISMS if re.search(pattern, text, re.I)), "other")


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def parse_audit(text: str) -> Audit | None:
    """`grep -c 'pattern' file -> 0 hits` as an audit; None where the text is not of that form."""
    command = _AUDIT.search(text)
    hits = _HITS.search(text, command.end()) if command else None
    if command is None or hits is None:
        return None
    pattern = next(g for g in command.groups()[:3] if g)
    count, least = int(hits["a"] or hits["b"]), hits["least_a"] or hits["least_b"]
    return Audit(
        kind="code",
        pattern=pattern,
        files=[command[4].strip("`'\",;:")],
        least=count,
        most=None if least else count,
    )


def export_entries(entries: Iterable[Entry], base: Mapping[str, Any], today: str) -> dict[str, Any]:
    """`base` with every accepted entry as an O-node. Numbers are never reused; `metadata` gets a new version.

    Raises BlueprintError when `base` has no place for them, or a key would stand for something else.
    """
    data = copy.deepcopy(dict(base))
    node = find(data, PERFORMANCE)
    if not isinstance(node, dict):
        raise BlueprintError(f"{'.'.join(PERFORMANCE)} is not there")
    taken = [int(m[1]) for key in node if (m := re.match(r"^[Oo](\d+)_", key))]
    number = max(taken, default=0)
    for entry in sorted((e for e in entries if e.status is Status.ACCEPTED), key=lambda e: e.id):
        if entry.legacy is not None and _NODE.match(entry.legacy.key):
            key = entry.legacy.key
        else:
            key = next((k for k, v in node.items() if isinstance(v, dict) and v.get("entry_id") == entry.id), "")
        if not key:
            number += 1
            key = f"O{number}_{re.sub(r'[^a-z0-9]+', '_', entry.mechanism.lower())}"
        elif isinstance(old := node.get(key), dict) and old.get("entry_id", entry.id) != entry.id:
            raise BlueprintError(f"{key} is already {old['entry_id']}; {entry.id} cannot have it")
        node[key] = _exported(entry)
    metadata = data.setdefault("metadata", {})
    metadata["version"] = _next_version(str(metadata.get("version", "0.0.0")))
    metadata["last_updated"] = today
    return data


def _exported(entry: Entry) -> dict[str, Any]:
    legacy = entry.legacy or Legacy(key="")
    node: dict[str, Any] = {
        "priority": legacy.priority or ("measured win" if entry.role == "win" else "enabler"),
        "rule": entry.rule,
        "why": entry.why,
        "real_engine": legacy.real_engine or f"{', '.join(entry.scope.engine)} (run {entry.evidence.run})",
        "apply_to": legacy.apply_to or sorted(_patched_files(entry.patch)),
        "audit_check": legacy.audit_check or "; ".join(_audit_text(a) for a in entry.audit),
        "entry_id": entry.id,
        "scope": entry.scope.model_dump(),
        "preconditions": entry.preconditions,
        "conflicts_with": entry.conflicts_with,
        "supersedes": entry.supersedes,
        "detection": entry.detection.model_dump(exclude_none=True),
        "evidence": entry.evidence.model_dump(exclude_none=True),
        "status": entry.status.value,
        "reviewer": entry.reviewer,
        "discovered": entry.proposed_on,
        "source_refs": [f"{r.repository}:{r.file}" + (f"@{r.commit}" if r.commit else "") for r in entry.source_refs],
    }
    if gain := entry.gain.marginal or entry.gain.series:
        node["measured_gain"] = _measured(gain, entry.gain.leave_one_out)
    return node


def _measured(gain: Gain, alone: Gain | None) -> dict[str, Any]:
    found = {"metric": gain.metric, "before": 1.0, "after": gain.ratio, "n": gain.pairs, "ci": list(gain.ci95)}
    return {**found, "ablation_only": alone.ratio if alone else None, "cumulative": False}


def _patched_files(patch: str | None) -> set[str]:
    return set(re.findall(r"^\+\+\+ b/(\S+)", patch or "", re.M))


def _audit_text(audit: Audit) -> str:
    where = " ".join(audit.files) or "every file"
    most = "any number" if audit.most is None else str(audit.most)
    return f"{audit.kind}: {audit.pattern!r} in {where}: {audit.least} to {most} hits"


def _next_version(version: str) -> str:
    parts = version.split(".")
    last = parts[-1]
    return ".".join([*parts[:-1], str(int(last) + 1)]) if last.isdigit() else f"{version}.1"
