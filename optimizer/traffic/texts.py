"""Text of many kinds for prompts, made from a stream of secret random numbers.

Not for: tokens and lengths (`prompts.py`). Small word lists stand here; the rest is generated. English comes from
Python's own language reference (`pydoc_data`), which every interpreter carries.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import cache

Rand = Callable[[int], int]  # n -> a number in [0, n)

WORDS = {
    "de": "der die das und nicht ist mit für über Straße müssen größer Abend heute Brücke fließt schön weiß".split(),
    "fr": "le la les une être où déjà français élève garçon très bientôt c'était l'été fenêtre sœur mais donc".split(),
    "es": "el la los niño mañana ¿dónde? corazón español también después lluvia sí camino árbol año señor".split(),
    "pl": "jest nie się że łódź źródło święto kiedy dziękuję książka wczoraj różne ćma żółty gęś między".split(),
    "tr": "bir ve için değil güneş çocuk ışık şimdi ağaç yağmur öğrenci büyük İstanbul kırmızı soğuk".split(),
    "vi": "tôi không được người Việt đường những một trời nước đẹp học sinh buổi sáng phố cửa".split(),
    "ru": "не что это как время дом вчера люди снег хорошо поезд объект щука ёлка быстрый между".split(),
    "uk": "це її зброя їжак ґанок вулиця сьогодні дякую п'ять місто".split(),
    "el": "και το είναι δεν θάλασσα φως ημέρα σήμερα άνθρωπος ψωμί ξένος".split(),
    "he": "של את לא הוא שלום ספר מים בית היום ילד גדול".split(),
    "ar": "في من على السلام كتاب الماء اليوم مدرسة جميل الشمس لا".split(),
    "fa": "است که این خانه کتاب آب امروز چرا گربه پنجره می‌رود".split(),
    "hi": "है और नहीं पानी किताब आज घर सूरज बच्चा क्यों सुंदर".split(),
    "bn": "আমি জল বই আজ ঘর সূর্য না কেন সুন্দর নদী".split(),
    "ta": "நான் நீர் இன்று வீடு புத்தகம் அழகு சூரியன் இல்லை".split(),
    "th": "ฉัน น้ำ วันนี้ บ้าน หนังสือ สวย ดวงอาทิตย์ ไม่ ทำไม".split(),
    "zh": "我 不 是 今天 水 图书 漂亮 太阳 为什么 城市 学生 河流 速度 测量 引擎".split(),
    "ja": "私 は 今日 水 本 きれい 太陽 なぜ 町 学生 エンジン 速い です ました".split(),
    "ko": "나는 물 오늘 집 책 아름다운 태양 왜 도시 학생 빠르다 않다".split(),
    "sw": "mimi maji leo nyumba kitabu nzuri jua kwa nini mtoto habari".split(),
}
RARE_BLOCKS = (
    (0x0530, 0x0556), (0x10A0, 0x10C5), (0x1200, 0x1248), (0x13A0, 0x13EF), (0x1400, 0x1500), (0x16A0, 0x16EA),
    (0x1780, 0x17B3), (0x1800, 0x1842), (0x0F40, 0x0F6C), (0x0D85, 0x0DC6), (0x2C00, 0x2C2E), (0x2D30, 0x2D67),
    (0xA000, 0xA3FF), (0x10330, 0x1034A), (0x12000, 0x12100), (0x13000, 0x13100), (0x1F300, 0x1F5FF),
    (0x20000, 0x20100), (0x1D400, 0x1D454),
)  # fmt: skip
NAMES = "alpha batch cache delta edge frame graph head index job key layer mask node offset page queue rank".split()
OPERATORS = ("+", "-", "*", "//", "%", "<<", "&", "==", "!=", "<=", "and", "or", "in")


def pick(rand: Rand, items):
    return items[rand(len(items))]


def languages(rand: Rand) -> str:
    """A few sentences, each of one language."""
    out = []
    for _ in range(4):
        words = pick(rand, list(WORDS.values()))
        glue = "" if words in (WORDS["zh"], WORDS["ja"], WORDS["th"]) else " "
        out.append(glue.join(pick(rand, words) for _ in range(4 + rand(12))) + pick(rand, (". ", "! ", "? ", "。")))
    return "".join(out)


def code(rand: Rand) -> str:
    def expression(depth: int) -> str:
        if depth == 0 or rand(3) == 0:
            return pick(rand, (pick(rand, NAMES), str(rand(1000)), f'"{pick(rand, NAMES)}"', f"{pick(rand, NAMES)}[{rand(9)}]"))
        return f"({expression(depth - 1)} {pick(rand, OPERATORS)} {expression(depth - 1)})"

    lines = [f"def {pick(rand, NAMES)}_{rand(100)}({pick(rand, NAMES)}: int, {pick(rand, NAMES)}=None):"]
    for _ in range(6):
        name = pick(rand, NAMES)
        lines.append(
            pick(
                rand,
                (
                    f"    {name} = {expression(2)}",
                    f"    for {name} in range({rand(99)}):\n        {pick(rand, NAMES)}.append({expression(1)})",
                    f"    if {expression(1)}:\n        return {expression(2)}",
                    f'    raise ValueError(f"{{{name}!r}} is not {rand(100)}")  # {pick(rand, NAMES)}',
                ),
            )
        )
    return "\n".join(lines) + "\n\n"


def numbers(rand: Rand) -> str:
    kinds = (
        lambda: str(rand(10 ** (1 + rand(12)))),
        lambda: f"{rand(10**6) / 997:.{rand(9)}f}",
        lambda: f"{1900 + rand(200)}-{1 + rand(12):02d}-{1 + rand(28):02d}T{rand(24):02d}:{rand(60):02d}:{rand(60):02d}Z",
        lambda: f"0x{rand(2**32):08x}",
        lambda: f"{rand(1000)}e-{rand(30)}",
        lambda: f"{rand(256)}.{rand(256)}.{rand(256)}.{rand(256)}",
    )
    return "".join(pick(rand, kinds)() + pick(rand, (" ", ", ", "\n", "\t", ";")) for _ in range(24))


def rare_scripts(rand: Rand) -> str:
    out = []
    for _ in range(5):
        low, high = pick(rand, RARE_BLOCKS)
        out.append("".join(chr(low + rand(high - low)) for _ in range(3 + rand(9))))
    return " ".join(out) + " "


def repetition(rand: Rand) -> str:
    """The same few words over and over, with a slip now and then."""
    words = [pick(rand, NAMES) for _ in range(1 + rand(5))]
    phrase = " ".join(words) + pick(rand, (" ", ". ", "\n"))
    return "".join(phrase if rand(9) else pick(rand, NAMES) + " " for _ in range(16))


def noise(rand: Rand) -> str:
    alphabet = string.printable + "äß€→∑\u200b\u00a0\ufeff"
    return "".join(pick(rand, alphabet) for _ in range(120))


@cache
def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def document(rand: Rand) -> str:
    """A slice from the middle of a page of Python's language reference."""
    page = pick(rand, _topics())
    start = rand(max(1, len(page) - 400))
    return page[start : start + 4000]


KINDS: dict[str, Callable[[Rand], str]] = {
    "languages": languages,
    "code": code,
    "numbers": numbers,
    "rare_scripts": rare_scripts,
    "repetition": repetition,
    "noise": noise,
    "document": document,
}
