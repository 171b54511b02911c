"""Launch the graph of the next greedy decode step before the tokens of the present one are read.

For an engine whose decode steps are replayed as CUDA graphs by `cuda-graph-capture`: what the host does between two
steps then happens while the device computes. Looked for: that skill's `DecodeGraphs`, and the method that asks it. Once
that is there, a second patch lets several ranks do it: the scheduler says in the plan what only rank 0 can know. With more
than one rank both come as one series.
"""

from __future__ import annotations

import re

import codemod_tools as t
import gpu_tools as gpu
import libcst as cst

AHEAD = '''

@dataclass(frozen=True, slots=True)
class _Launched:
    items: list[GenerationItem]
    step: Any  # whose graph was launched
    tokens: torch.Tensor  # on the host, once `done`
    done: Any


class RunAhead:
    """Greedy decode steps, one ahead: the next step's graph is launched before the present step's tokens are read.

    Tokens go from step to step on the device; their copy to the host waits for its own step alone. A step launched ahead
    is used when the next plan is the expected one, else forgotten: what it wrote are keys and values of a position that
    whoever gets it writes again before reading it. Not for: sampling, log-probabilities, several ranks.
    """

    Event: Any = torch.cuda.Event

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.ahead: _Launched | None = None

    @torch.inference_mode()
    def tokens(self, plan: StepPlan, sequences: list[Sequence]) -> list[int] | None:
        """The step's tokens, in the plan's order; None when the caller must compute them."""
        if self.runner.tp.size > 1:
            return None
        ahead, self.ahead = self.ahead, None
        if ahead is not None and self.places(ahead.items) != self.places(plan.generation):
            ahead.done.synchronize()  # forgotten; its host buffer may be filled again
            ahead = None
        if not all(_plain(s) for s in sequences):
            return None
        now = ahead if ahead is not None and not plan.context else self.launch(plan, None)
        if now is None:
            return None
        following = None if plan.context else self.following(plan, sequences)
        if following is not None:
            self.ahead = self.launch(following, now.step)
        now.done.synchronize()
        return now.tokens[: len(plan.context) + len(plan.generation)].tolist()

    def launch(self, plan: StepPlan, after: Any) -> _Launched | None:
        """`after`: the graph whose tokens this step continues, before the host knows them."""
        step = self.runner.graphs.launch(plan, after)
        if step is None:
            return None
        tokens, done = step.back[step.turn], self.Event()
        tokens.copy_(step.tokens, non_blocking=True)
        done.record()
        return _Launched(plan.generation, step, tokens, done)

    def following(self, plan: StepPlan, sequences: list[Sequence]) -> StepPlan | None:
        """The next plan if every sequence goes on, or None: one reaches its length, or needs a page it has not got."""
        if any(len(s.output_ids) + 1 >= s.params.max_tokens for s in sequences):
            return None
        items = [replace(item, position=item.position + 1) for item in plan.generation]
        if any(item.position >= len(item.block_table) * self.runner.block_size for item in items):
            return None
        return replace(plan, generation=items, finished=[])

    def places(self, items: list[GenerationItem]) -> list[tuple[int, int, int]]:
        """Sequence, position and page of what is written. Pages that are reserved for later do not matter."""
        return [(i.seq_id, i.position, i.block_table[i.position // self.runner.block_size]) for i in items]


def _plain(sequence: Sequence) -> bool:
    params = sequence.params
    greedy = params.temperature < sampler.GREEDY_BELOW and params.logprobs is None
    return greedy and len(sequence.output_ids) >= params.min_tokens
'''
# What changes in the graphs: two host buffers in turn, greedy tokens inside the graph, a launch without reading.
GRAPHS = (
    ("from dataclasses import replace\n", "from dataclasses import dataclass, replace\n"),
    ("from engine.attention import AttentionMetadata\n", "from engine import sampler\nfrom engine.attention import AttentionMetadata\n"),
    (
        '''        self.host = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
''',
        '''        pinned = device.type == "cuda"
        self.hosts = [torch.zeros(end, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self.back = [torch.zeros(min(size, BUCKETS[-1]), dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self.turn = 0
''',
    ),
    (
        '''        self.views = [part.numpy() for part in self._cut(self.host, size)]
''',
        '''        self.views = [[part.numpy() for part in self._cut(host, size)] for host in self.hosts]
''',
    ),
    (
        '''        self.logits: torch.Tensor | None = None
''',
        '''        self.logits: torch.Tensor | None = None
        self.tokens: torch.Tensor | None = None  # the greedy ones
''',
    ),
    (
        '''        """The last step's tokens were read back, so the last copy has run and its source may be overwritten."""
        wide, counts, rows = self.views
''',
        '''        """Two host buffers in turn: tokens of the last step but one were read back, so its copy has run."""
        self.turn = 1 - self.turn
        wide, counts, rows = self.views[self.turn]
''',
    ),
    ("        self.there.copy_(self.host, non_blocking=True)\n", "        self.there.copy_(self.hosts[self.turn], non_blocking=True)\n"),
    (
        '''        step = self.fitting(plan)
        if step is None:
            return None
''',
        '''        step = self.launch(plan)
        return None if step is None or step.logits is None else step.logits[: len(plan.context) + len(plan.generation)]

    def launch(self, plan: StepPlan, after: _Step | None = None) -> _Step | None:
        """Replay the plan's graph. `after`: it goes on from the tokens of that graph, which the host does not know yet."""
        step = self.fitting(plan)
        if step is None or after not in (None, step):
            return None
''',
    ),
    (
        '''        step.graph.replay()
        return None if step.logits is None else step.logits[: len(plan.context) + len(plan.generation)]
''',
        '''        if after is not None:
            step.ids.copy_(step.tokens)
        step.graph.replay()
        return step
''',
    ),
    (
        '''            step.logits = self.forward(step, metadata)
''',
        '''            step.logits = self.forward(step, metadata)
            step.tokens = step.logits.argmax(dim=-1)  # 16 bits order as their float32 does
''',
    ),
)

# With graphs for prompts, and without.
REQUEST = (
    ("from engine.request import ContextItem, GenerationItem, StepPlan\n", "from engine.request import ContextItem, GenerationItem, Sequence, StepPlan\n"),
    ("from engine.request import StepPlan\n", "from engine.request import GenerationItem, Sequence, StepPlan\n"),
)

# The second patch: who runs ahead reads the plan, which every rank gets, and not the sequences, which rank 0 alone has.
SEVERAL = (
    ("    whoever gets it writes again before reading it. Not for: sampling, log-probabilities, several ranks.\n",
     "    whoever gets it writes again before reading it. Several ranks decide alike: by the plan alone, and every rank's greedy\n"
     "    tokens are those of the same gathered logits. Not for: sampling, log-probabilities.\n"),
    ("        if self.runner.tp.size > 1:\n            return None\n        ahead, self.ahead", "        ahead, self.ahead"),
    ("        if not all(_plain(s) for s in sequences):\n", "        if not plan.greedy:\n"),
    ("        following = None if plan.context else self.following(plan, sequences)\n", "        following = None if plan.context else self.following(plan)\n"),
    ("    def following(self, plan: StepPlan, sequences: list[Sequence]) -> StepPlan | None:\n", "    def following(self, plan: StepPlan) -> StepPlan | None:\n"),
    ("        if any(len(s.output_ids) + 1 >= s.params.max_tokens for s in sequences):\n", "        if not plan.goes_on:\n"),
    ("    def tokens(self, plan: StepPlan, sequences: list[Sequence]) -> list[int] | None:\n", "    def tokens(self, plan: StepPlan, _: list[Sequence]) -> list[int] | None:\n"),
    ("""

def _plain(sequence: Sequence) -> bool:
    params = sequence.params
    greedy = params.temperature < sampler.GREEDY_BELOW and params.logprobs is None
    return greedy and len(sequence.output_ids) >= params.min_tokens
""", ""),
    ("from engine import sampler\n", ""),
)  # fmt: skip
FLAGS = "greedy: bool = False  # every sequence takes the likeliest token\ngoes_on: bool = False  # and none that generates ends with it by its length\n"
PLAIN = '''

def _plain(sequence: Sequence) -> bool:
    """Its next token is the likeliest one, and nobody asks for more."""
    params = sequence.params
    return params.temperature < GREEDY_BELOW and params.logprobs is None and len(sequence.output_ids) >= params.min_tokens
'''


def propose(sources: dict[str, str], finding: dict) -> dict | list[dict]:
    """One patch, on several ranks two, or why there is none. A finding without `tp` is of any number of ranks."""
    place = _place(sources)
    if isinstance(place, str):
        return {"declined": place}
    ranks = finding.get("tp")
    if "self.ahead" in sources[place[0].file]:
        return {"declined": "the next step is launched ahead already"} if ranks == 1 else _several(sources, place[1], finding)
    first = _first(sources, *place, finding)
    if "declined" in first or not ranks or ranks == 1:
        return first
    second = _several({**sources, **first["sources"]}, place[1], finding)
    return second if "declined" in second else [first | {"predicted_us": 0.0, "activation": {"appear": [], "vanish": []}}, second]


def _first(sources: dict[str, str], function: t.Function, graphs: str, finding: dict) -> dict:
    """One rank launches ahead."""
    file = function.file
    imports = REQUEST[0] if "import ContextItem, " in sources[graphs] else REQUEST[1]
    changed, missing = gpu.replaced(sources[graphs], (*GRAPHS, imports), file, sources)
    if missing is not None:
        return {"declined": f"{graphs} is not as cuda-graph-capture wrote it: {missing.strip().splitlines()[0][:60]!r}"}
    return {
        "sources": {graphs: changed.rstrip() + "\n" + AHEAD, file: _runner(sources[file], function)} | _pages(sources),
        "mechanism": "overlap-scheduling",
        "title": "Launch the next greedy step before the tokens of this one are read",
        "predicted_us": finding.get("bound_us"),
        "invariants": [
            "a step launched ahead is used only for the plan that was expected",
            "a sequence that ended computes one step too many, whose token is never sent",
            "a page is given a step early only where every running sequence could still get one",
        ],
        "params": {},
        "activation": {"appear": [{"row": "cudaEventSynchronize", "phase": "decode", "ranks": "all"}], "vanish": []},
    }


def _several(sources: dict[str, str], graphs: str, finding: dict) -> dict:
    """The second patch, once steps are launched ahead on one rank."""
    changed, missing = gpu.replaced(sources[graphs], SEVERAL, graphs, sources)
    plans, told = _flags(sources), _telling(sources)
    if missing is not None or plans is None or told is None:
        return {"declined": "the next step is launched ahead already"}
    return {
        "sources": {graphs: changed} | plans | told,
        "mechanism": "overlap-scheduling",
        "title": "Several ranks launch the next greedy step ahead",
        "predicted_us": finding.get("bound_us"),
        "invariants": ["every rank decides by the plan alone", "a plan says on rank 0 what sequences ask for"],
        "params": {},
        "activation": {"appear": [{"row": "cudaEventSynchronize", "phase": "decode", "ranks": "all"}], "vanish": []},
    }


def _flags(sources: dict[str, str]) -> dict[str, str] | None:
    """The plan with two more fields."""
    for file, tree in t.parse_all(sources, "class StepPlan").items():
        cls = t.classes({file: tree}).get("StepPlan")
        fields = [s for s in cls.node.body.body if isinstance(s, cst.SimpleStatementLine) and isinstance(s.body[0], cst.AnnAssign)] if cls else []
        if fields:
            return {file: t.replace(tree, {fields[-1]: lambda updated: [updated, *t.statements(FLAGS)]}).code}
    return None


def _telling(sources: dict[str, str]) -> dict[str, str] | None:
    """The scheduler, which fills them."""
    place = _scheduling(sources)
    if place is None or "_plain" in sources[place[0].file]:
        return None
    function, grown, *_ = place
    begun = next((p[0] for s in function.statements() if (p := t.assigned(s)) and t.code(p[1]).startswith("self._admit(")), None)
    if begun is None:
        return None
    flags = (f"greedy=all(_plain(s) for s in [*{begun}, *{grown}])", f"goes_on=all(len(s.output_ids) + 1 < s.params.max_tokens for s in {grown})")
    told = cst.parse_module(_with_arguments(sources[function.file], "StepPlan(", flags))
    line = gpu.local_names("from engine.sampler import GREEDY_BELOW", function.file, sources)
    return {function.file: t.add_import(told, line).code.rstrip() + "\n" + PLAIN}


def _with_arguments(text: str, call: str, more: tuple[str, ...]) -> str:
    """More keyword arguments at the end of the first such call, on lines of their own where the others are."""
    first = text.index(call) + len(call)
    depth, last = 1, first
    while depth:
        depth += {"(": 1, ")": -1}.get(text[last], 0)
        last += 1
    inside = text[first : last - 1]
    if not inside.rstrip().endswith(","):
        return text[: last - 1] + "".join(f", {m}" for m in more) + text[last - 1 :]
    indent = re.findall(r"\n[ ]+", inside.rstrip())[-1]
    return text[:first] + inside.rstrip() + "".join(f"{indent}{m}," for m in more) + inside[len(inside.rstrip()) :] + text[last - 1 :]


def _pages(sources: dict[str, str]) -> dict[str, str]:
    """The scheduler, giving each running sequence its next page a step early; nothing where it is not recognised."""
    place = _scheduling(sources)
    if place is None:
        return {}
    function, grown, plan, tree = place
    lines = (
        f"for sequence in {grown}:  # the next step's page, so that it can be launched ahead\n"
        "    if self.blocks.num_free > len(self.running):\n"
        "        self.blocks.grow(sequence.block_table, len(sequence) + 1)\n"
    )
    return {function.file: t.replace(tree, t.before(plan, lines)).code}


def _scheduling(sources: dict[str, str]) -> tuple[t.Function, str, cst.BaseStatement, cst.Module] | None:
    """(the method that makes a plan, its name for the sequences that go on, the statement with the plan, its file's tree)."""
    trees = t.parse_all(sources, "_grow_running()")
    for function in t.functions(trees):
        body = list(function.statements())
        grown = next((p[0] for s in body if (p := t.assigned(s)) and t.code(p[1]) == "self._grow_running()"), None)
        plan = next((s for s in body if (p := t.assigned(s)) and t.code(p[1]).startswith("StepPlan(")), None)
        if grown is not None and plan is not None and "self.running.extend(" in t.code(function.node):
            return function, grown, plan, trees[function.file]
    return None


def _place(sources: dict[str, str]) -> tuple[t.Function, str] | str:
    """(the method that asks the graphs for a plan's logits, the graphs' file)."""
    for function in t.functions(t.parse_all(sources, "DecodeGraphs(")):
        if "self.graphs.logits(" not in t.code(function.node):
            continue
        graphs = gpu.new_file(sources, function.file, "decode_graphs")
        names = list(function.params)
        made = "StepResult(tokens, logprobs)"
        if graphs not in sources or len(names) != 3 or made not in t.code(function.node) or "self.remember(" not in t.code(function.node):
            return f"{function.name} does not turn a plan and its sequences into a StepResult of tokens"
        return function, graphs
    return "decode steps are not replayed as graphs by DecodeGraphs: cuda-graph-capture goes first"


def _runner(text: str, found: t.Function) -> str:
    """The runner with `self.ahead` made in __init__ and asked first."""
    _, plan, sequences = found.params
    tree = cst.parse_module(text)
    cls = t.classes({found.file: tree})[found.cls]
    first = cls.methods[found.name].statements()[0]
    ask = (
        f"tokens = self.ahead.tokens({plan}, {sequences}) if self.ahead is not None else None\n"
        "if tokens is not None:\n"
        f"    self.remember({plan}, tokens)\n"
        "    return StepResult(tokens, [None] * len(tokens))\n"
    )
    init = cls.methods["__init__"].statements()[-1]
    line = "self.ahead = RunAhead(self) if self.graphs is not None else None\n"
    new: dict[cst.CSTNode, object] = {**t.before(first, ask), init: lambda updated: [updated, *t.statements(line)]}
    folder = found.file.rpartition("/")[0].replace("/", ".")
    there = f"{folder}.decode_graphs" if folder else "decode_graphs"
    changed = t.replace(tree, new).code
    return changed.replace(f"from {there} import DecodeGraphs\n", f"from {there} import DecodeGraphs, RunAhead\n", 1)
