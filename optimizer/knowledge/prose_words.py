"""How knowledge in prose says things, in English and Chinese: the words that `prose.py` compares.

Each reader takes one sentence (or one line of pseudocode) and returns what it states. Names of code are ASCII, so
they are found between Chinese characters as well. Not for: contradictions (prose.py).
"""

from __future__ import annotations

import re

FORBID = re.compile(
    r"\b(forbid\w*|must not|mustn't|never|do not|don't|avoid\w*|banned|ban|not allowed|disallow\w*|prohibit\w*|instead of|rather than|"
    r"no longer|not permitted|may not|should not|shall not)\b|, not\b|禁止|不得|不要|不允许|不应|不能|不可|避免|严禁|禁用",
    re.I,
)
DEMAND = re.compile(
    r"\b(use|uses|using|prefer\w*|recommend\w*|must|should|mandatory|require\w*|allocate\w*|apply|call|calls|capture\w*|goes through)\b|"
    r"必须|使用|建议|强制|推荐|应当|应该|采用|调用",
    re.I,
)
PASSIVE = re.compile(r"(\b(is|are|was|be)\s+(strictly |always )?|被|均)$", re.I)  # "x is forbidden": what is meant stands before
_CODE = re.compile(r"`([^`]+)`|(?<![A-Za-z0-9_.])(torch(?:\.[a-z_]+)+)|(?<![A-Za-z0-9_])([A-Za-z][A-Za-z0-9]*_[A-Za-z0-9_]*)")
CONCEPTS = {
    "CUDA graphs": re.compile(r"cuda[ _-]?graphs?", re.I),
    "allocating the whole cache": re.compile(
        r"\b(full|whole|complete|entire)\b[^.;]{0,30}?\b(allocation|up[ -]?front|at once)|\ballocat\w*[^.;]{0,20}\b(full|whole|complete|entire)\b|"
        r"一次性分配|全量分配|\((?:self\.)?max_blocks\b",
        re.I,
    ),
}
PHASES = ("prefill", "decode")
_ONLY_IN = re.compile(
    r"(?<![A-Za-z0-9_])(\w+_\w*)`?\s*(?:\w+\s+){0,2}?(?:only (?:in|for|to|during)|reserved for|exclusively (?:in|for)|仅用于|只用于|仅限|只在)\s*(decode|prefill)",
    re.I | re.A,
)
_CONSTANT = re.compile(
    r"(?<![A-Za-z0-9_])([a-z]+(?:_[a-z0-9]+)+)(?![A-Za-z0-9_])`?\s*(?:==|=|:|：|\bis\b|\bof\b|\bequals\b|为|是|取)\s*(\d[\d,]*)(?![\d.]*\s*(?:tok|ms|us|%|[/*+]))"
)
_WORKED_OUT = re.compile(r"(?<![A-Za-z0-9_])([a-z]+(?:_[a-z0-9]+)+)\s*=[^=;]*\d[^=;]*=\s*(\d[\d,]*)")  # name = 32768 // 256 = 128
NAME_OF_CONSTANT = re.compile(r"^[a-z]+(?:_[a-z0-9]+)+$")
_UP = re.compile(r"\bceil\w*|round\w*\s+up|向上取整|上取整", re.I)
_DOWN = re.compile(r"\bfloor\w*|round\w*\s+down|向下取整|下取整", re.I)
_UP_CODE = re.compile(r"\(?\s*([A-Za-z_]\w*)\s*\+\s*([A-Za-z_]\w*)\s*-\s*1\s*\)\s*//\s*\2|-\(-\s*([A-Za-z_]\w*)\s*//\s*([A-Za-z_]\w*)", re.A)
_QUOTIENT = re.compile(r"([A-Za-z_]\w*)\s*(//|/)\s*([A-Za-z_]\w*)", re.A)
_RESULT = re.compile(r"(?<![A-Za-z0-9_])([a-z]+(?:_[a-z0-9]+)+)\s*=(?!=)")
SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*(?:tok|token|tokens)/s", re.I)
_SETUP = re.compile(r"(single|one|1)[ -]?(?:GPU|card)\b|(?:tp|TP)\s?=\s?(\d+)|(\d+)\s?[x×]?\s?(?:GPUs|cards|卡)|(单)\s?(?:卡|GPU)", re.I)
_READS = re.compile(
    r"\b(no|none|zero|0|one|single|1)\b[^;]{0,40}?(?:\bitems?\b|\.item\b|\bhost (?:read|sync)s?\b)|([01])\s*次[^,，。;；]{0,12}(?:item|同步|回读)|(零)\s*(?:次\s*)?item",
    re.I,
)
_NUMBERS = {"no": 0, "none": 0, "zero": 0, "0": 0, "零": 0, "one": 1, "single": 1, "1": 1}
KEYWORD_ONLY = re.compile(r"\bkeywords?\b|关键字", re.I)
_NEXT, _OWN = re.compile(r"(next|following|subsequent) layer|下一层|后一层", re.I), re.compile(r"\b(own|same|this) layer|this layer's|本层|同一层|自身", re.I)
WEIGHT = re.compile(r"weight|权重", re.I)
_LAYOUT = re.compile(
    r"kv[ _-]?cache[^.;。；]{0,25}?(?<!non-)(?<!not )\b(contiguous|paged)\b|\b(contiguous|paged) (?:kv|key-value)[ _-]?cache|KV\s*cache[^,，。；]{0,10}?(?<!非)(?<!不)(连续|分页)", re.I
)
_LAYOUTS = {"连续": "contiguous", "分页": "paged"}
SCRIPTS = re.compile(r"(\d+)\s+(?:\w+ )?scripts\b|(\d+)\s*个?\s*(?:测试|门禁)?脚本", re.I)
MODES = re.compile(r"\d+\s*/\s*(\d+)\s*(?:FM\b|failure modes)|(?:\bFM\b|failure modes?|失败模式)[^.;。；]{0,20}?\d+\s*/\s*(\d+)", re.I)
_PATCH = (
    re.compile(r"\+(\d+)\s*/\s*[-−–](\d+)"),
    re.compile(r"\b(\d+) (?:lines? )?added\b[^.;]{0,12}?(\d+) (?:lines? )?(?:removed|deleted)", re.I),
    re.compile(r"\badd(?:s|ed|ing)? (\d+)(?: lines?)?[^.;]{0,8}?(?:remov|delet)\w+ (\d+)", re.I),
    re.compile(r"(?:新增|增加)\s*(\d+)\s*行[^。；]{0,6}?(?:删除|减少)\s*(\d+)\s*行"),
)
DISOWNED = re.compile(
    r"\b(untraceable|not traceable|disown\w*|retract\w*|withdrawn|cannot be (?:reproduced|traced)|not reproducible)\b|无法追溯|不可追溯|无法复现|作废", re.I
)
_NAMES = re.compile(r"(?<![A-Za-z0-9_])(ROUND_[A-Za-z0-9_]+|[\w/]+\.(?:md|json)|(?=[0-9a-f]*\d)[0-9a-f]{7,40})(?![A-Za-z0-9_])", re.A)
_FIXED = re.compile(r"\bconstant\b|\bfixed\b|hard-?coded|never (?:decremented|updated|changed|reduced)|常量|固定|写死|硬编码", re.I)
_COUNT = re.compile(r"(?:num_)?(?:free|available|remaining)[ _-]?(?:block|page|slot)s?|(?:空闲|剩余|可用)(?:块|页|槽)", re.I)


def terms(text: str) -> list[str]:
    """Names of code, and concepts that have more than one name."""
    found = [next(g for g in groups if g).rstrip("()") for groups in _CODE.findall(text)]
    found = [last if "_" in (last := name.rpartition(".")[2]) else name for name in found]  # torch.empty_like is empty_like
    return found + [name for name, pattern in CONCEPTS.items() if pattern.search(text)]


def only_in(text: str) -> list[tuple[str, str]]:
    """(name, phase): said to belong to one phase only."""
    return [(name, phase.lower()) for name, phase in _ONLY_IN.findall(text)]


def constants(text: str) -> list[tuple[str, str]]:
    return [(name, value.replace(",", "")) for name, value in [*_CONSTANT.findall(text), *_WORKED_OUT.findall(text)]]


def roundings(text: str) -> list[tuple[str, str]]:
    """(what, up or down): of quotients by numerator and divisor, and of the name that they are assigned to."""
    found: list[tuple[str, str]] = []
    up = [(a or c, b or d) for a, b, c, d in _UP_CODE.findall(text)]
    found += [(f"{a}/{b}", "up") for a, b in up]
    for a, sign, b in _QUOTIENT.findall(text):
        if any(b == by for _, by in up):
            continue
        way = "up" if _UP.search(text) else "down" if _DOWN.search(text) or sign == "//" else ""
        found += [(f"{a}/{b}", way)] if way else []
    if found and (result := _RESULT.search(text)):
        found.append((result[1], found[0][1]))
    return found


def setups(text: str) -> set[str]:
    """Numbers of GPUs that are named: TP=1, one card and a single GPU are one setup."""
    counts = {int(next((g for g in groups if g.isdigit()), "1")) for groups in _SETUP.findall(text)}
    return {f"{count} GPU{'s' if count > 1 else ''}" for count in counts}


def reads(text: str) -> list[int]:
    """Host reads per step that a sentence allows."""
    return [_NUMBERS[next(g for g in groups if g).lower()] for groups in _READS.findall(text)]


def owner(text: str) -> str:
    """`next` or `own`: the layer whose weight is meant; "" where none is."""
    return "next" if _NEXT.search(text) else "own" if _OWN.search(text) else ""


def layouts(text: str) -> list[str]:
    found = [str(word) for groups in _LAYOUT.findall(text) for word in groups if word]
    return [_LAYOUTS.get(word, word.lower()) for word in found]


def patch_sizes(text: str) -> list[tuple[str, str]]:
    return [size for pattern in _PATCH for size in pattern.findall(text)]


def names(text: str) -> list[str]:
    """Rounds, reports and commits that a sentence rests on."""
    return _NAMES.findall(text)


def fixes_a_changing_count(text: str) -> bool:
    return bool(_COUNT.search(text) and _FIXED.search(text))
