"""Record the decode step once per bucket of batch sizes as a CUDA graph, and launch that instead of its kernels; then
short steps with prompts, per bucket of tokens.

A series, each member passing alone: attention that reads no length on the host; the graphs; graphs for prompts. The
first is left out where it is there already. Looked for: a runner whose method turns a plan of context and generation
items into logits by `prepare`, the model and `compute_logits`.
"""

from __future__ import annotations

import codemod_tools as t
import gpu_tools as gpu
import libcst as cst

GRAPHS = '''"""Decode steps as CUDA graphs: one per bucket of batch sizes, recorded all together with the first decode step.

A step's numbers go to the device in one copy, to an address that the graph knows. Rows that fill up a bucket repeat the
first: they write the same key to the same slot. Not for: steps with prompts, larger batches (the caller computes those).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.attention import AttentionMetadata
from engine.request import StepPlan

BUCKETS = (1, 2, 4, 8, 16, 24, 32)
LEAST_PAGES = 64  # width of the page tables; it doubles when a sequence needs more


class _Step:
    """Memory of one graph: numbers on the host and on the device, and what comes out."""

    def __init__(self, size: int, pages: int, device: torch.device) -> None:
        self.size = size
        end = 8 * 3 * size + 4 * size * (1 + pages)
        self.host = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.there = torch.zeros(end, dtype=torch.uint8, device=device)
        self.views = [part.numpy() for part in self._cut(self.host, size)]
        wide, self.lengths, self.tables = self._cut(self.there, size)
        self.ids, self.positions, self.slots = wide
        self.graph: Any = None
        self.logits: torch.Tensor | None = None

    @staticmethod
    def _cut(data: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        narrow = data[8 * 3 * size :].view(torch.int32)
        return data[: 8 * 3 * size].view(torch.int64).view(3, size), narrow[:size], narrow[size:].view(size, -1)

    def fill(self, plan: StepPlan, newest: dict[int, int], block_size: int) -> None:
        """The last step's tokens were read back, so the last copy has run and its source may be overwritten."""
        wide, counts, rows = self.views
        for at, item in enumerate(plan.generation):
            table, position = item.block_table, item.position
            slot = table[position // block_size] * block_size + position % block_size
            wide[:3, at] = newest[item.seq_id], position, slot
            counts[at] = position + 1
            rows[at, : len(table)] = table
        wide[:, at + 1 :], counts[at + 1 :], rows[at + 1 :] = wide[:, :1], counts[0], rows[0]
        self.there.copy_(self.host, non_blocking=True)


class DecodeGraphs:
    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.steps: dict[tuple[int, int], _Step] = {}
        self.pool: Any = None  # shared: one graph runs at a time

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor | None:
        """[N, vocab], a row for each sequence, valid until the next call; None when the caller must compute them."""
        step = self.fitting(plan)
        if step is None:
            return None
        step.fill(plan, self.runner.newest, self.runner.block_size)
        step.graph.replay()
        return None if step.logits is None else step.logits[: len(plan.context) + len(plan.generation)]

    def fitting(self, plan: StepPlan) -> _Step | None:
        """The graph to use; None when the step suits none."""
        items = plan.generation
        if plan.context or not items or len(items) > BUCKETS[-1]:
            return None
        size = next(bucket for bucket in BUCKETS if bucket >= len(items))
        pages = max(len(item.block_table) for item in items)
        key = size, max(LEAST_PAGES, 1 << (pages - 1).bit_length())
        if key not in self.steps:
            self.record(replace(plan, generation=items[:1]), key[1])
        return self.steps[key]

    def record(self, one: StepPlan, pages: int) -> None:
        """All sizes at once, filled up with one sequence: else somebody would wait for each later on."""
        for size in reversed(BUCKETS):
            step = self.steps[size, pages] = _Step(size, pages, self.runner.tp.device)
            step.fill(one, self.runner.newest, self.runner.block_size)
            self.capture(step, one)

    def capture(self, step: _Step, plan: StepPlan) -> None:
        """Run the step twice on a stream of its own (compilers and libraries set themselves up), then record it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.forward(step, self.metadata(step, plan))
        torch.cuda.current_stream().wait_stream(side)
        step.graph, metadata = torch.cuda.CUDAGraph(), self.metadata(step, plan)
        with torch.cuda.graph(step.graph, pool=self.pool, capture_error_mode="thread_local"):
            step.logits = self.forward(step, metadata)
        self.pool = self.pool or step.graph.pool()

    def metadata(self, step: _Step, plan: StepPlan) -> AttentionMetadata:
        """Made anew for every run: what layers keep in it must not outlive the run."""
        made = self.runner.prepare(plan).attention
        return replace(made, slot_mapping=step.slots, block_tables=step.tables, seq_lens=step.lengths)

    def forward(self, step: _Step, metadata: AttentionMetadata) -> torch.Tensor:
        model = self.runner.model
        return model.compute_logits(model(step.ids, step.positions, self.runner.caches, metadata))
'''
# The third member: steps in which short prompts begin are rows of a graph too, and all is recorded before the first request.
# Pairs of texts, each found once.
PROMPTS = (
    ("from engine.request import StepPlan\n", "from engine.request import ContextItem, GenerationItem, StepPlan\n"),
    (
        '"""Decode steps as CUDA graphs: one per bucket of batch sizes, recorded all together with the first decode step.\n',
        '"""Steps as CUDA graphs: decode steps by bucket of batch sizes, short steps with prompts by bucket of tokens.\n',
    ),
    (
        '''
A step's numbers go to the device in one copy, to an address that the graph knows. Rows that fill up a bucket repeat the
first: they write the same key to the same slot. Not for: steps with prompts, larger batches (the caller computes those).
''',
        '''
Graphs are recorded by `warm`; without it those for prompts with the first prompt, those of decode steps with the first of
them, and those of wider page tables in any case when a context first needs them: all sizes together. A step's numbers go
to the device in one copy, to an address that the graph knows. Each token of a prompt is a row with a length of its own:
the step's keys lie in the cache before any row reads there. Rows that fill up a bucket repeat the first: they write the
same key to the same slot. Not for: long prompts or larger batches; for those `logits` returns None.
''',
    ),
    (
        '''BUCKETS = (1, 2, 4, 8, 16, 24, 32)
LEAST_PAGES = 64  # width of the page tables; it doubles when a sequence needs more
''',
        '''BUCKETS = (1, 2, 4, 8, 16, 24, 32)  # sequences of a decode step; a step with prompts holds 32 at most, too
PROMPTS = (16, 64, 128, 256, 512, 1024)  # tokens of a step in which prompts begin
ALONE = 512  # the most on one GPU: there arithmetic sets the pace of more, not the host
LEAST_PAGES = 64  # width of the page tables; of decode graphs it doubles when a sequence needs more
''',
    ),
    (
        '''size: int, pages: int, device: torch.device) -> None:
        self.size = size
        end = 8 * 3 * size + 4 * size * (1 + pages)
''',
        '''size: int, pages: int, device: torch.device, prompts: bool = False) -> None:
        self.size, self.prompts = size, prompts
        end = 8 * 4 * size + 4 * size * (1 + pages)
''',
    ),
    (
        '''        self.ids, self.positions, self.slots = wide
''',
        '''        self.ids, self.positions, self.slots, ends = wide
        self.ends = ends[: BUCKETS[-1]]  # of a graph for prompts: the last row of each sequence
''',
    ),
    (
        '''        narrow = data[8 * 3 * size :].view(torch.int32)
        return data[: 8 * 3 * size].view(torch.int64).view(3, size), narrow[:size], narrow[size:].view(size, -1)
''',
        '''        narrow = data[8 * 4 * size :].view(torch.int32)
        return data[: 8 * 4 * size].view(torch.int64).view(4, size), narrow[:size], narrow[size:].view(size, -1)
''',
    ),
    (
        '''        for at, item in enumerate(plan.generation):
''',
        '''        used = 0
        for number, prompt in enumerate(plan.context):
            table, positions = prompt.block_table, range(len(prompt.token_ids))
            own = slice(used, used + len(positions))
            slots = [table[p // block_size] * block_size + p % block_size for p in positions]
            wide[0, own], wide[1, own], wide[2, own] = prompt.token_ids, positions, slots
            counts[own], rows[own, : len(table)] = range(1, len(positions) + 1), table
            used += len(positions)
            wide[3, number] = used - 1
        wide[3, len(plan.context) : len(plan.context) + len(plan.generation)] = range(used, used + len(plan.generation))
        for at, item in enumerate(plan.generation, used):
''',
    ),
    (
        '''        wide[:, at + 1 :], counts[at + 1 :], rows[at + 1 :] = wide[:, :1], counts[0], rows[0]
''',
        '''        used += len(plan.generation)
        wide[:3, used:], counts[used:], rows[used:] = wide[:3, :1], counts[0], rows[0]
''',
    ),
    (
        '''        self.steps: dict[tuple[int, int], _Step] = {}
''',
        '''        self.steps: dict[tuple[int, int], _Step] = {}
        self.prompts: dict[int, _Step] = {}
        self.sizes = [size for size in PROMPTS if size <= ALONE or runner.tp.size > 1]
''',
    ),
    (
        '''        items = plan.generation
        if plan.context or not items or len(items) > BUCKETS[-1]:
            return None
        size = next(bucket for bucket in BUCKETS if bucket >= len(items))
        pages = max(len(item.block_table) for item in items)
''',
        '''        items = [*plan.context, *plan.generation]
        if not items or len(items) > BUCKETS[-1]:
            return None
        pages = max(len(item.block_table) for item in items)
        if plan.context:
            tokens = len(plan.generation) + sum(len(prompt.token_ids) for prompt in plan.context)
            if tokens > self.sizes[-1] or pages > LEAST_PAGES:
                return None
            return self.for_prompts(plan)[next(size for size in self.sizes if size >= tokens)]
        size = next(bucket for bucket in BUCKETS if bucket >= len(items))
''',
    ),
    (
        '''    def capture(self, step: _Step, plan: StepPlan) -> None:
''',
        '''    @torch.inference_mode()
    def warm(self) -> None:
        """Record now, with a token of no sequence: what it writes, the page's owner writes again before reading it."""
        self.runner.newest[-1] = 0
        self.fitting(StepPlan([ContextItem(-1, [0], [0])], [], []))
        self.fitting(StepPlan([], [GenerationItem(-1, 0, [0])], []))
        del self.runner.newest[-1]

    def for_prompts(self, plan: StepPlan) -> dict[int, _Step]:
        """All graphs for prompts. Their warm-up computes a prompt's first token, which this step computes in any case."""
        if not self.prompts:
            prompt = plan.context[0]
            first = replace(plan, context=[replace(prompt, token_ids=prompt.token_ids[:1])], generation=[])
            for size in reversed(self.sizes):
                step = self.prompts[size] = _Step(size, LEAST_PAGES, self.runner.tp.device, prompts=True)
                step.fill(first, self.runner.newest, self.runner.block_size)
                self.capture(step, first)
        return self.prompts

    def capture(self, step: _Step, plan: StepPlan) -> None:
''',
    ),
    (
        '''        return replace(made, slot_mapping=step.slots, block_tables=step.tables, seq_lens=step.lengths)
''',
        '''        own = {"slot_mapping": step.slots, "block_tables": step.tables, "seq_lens": step.lengths}
        return replace(made, num_context_tokens=0, **own)
''',
    ),
    (
        '''        return model.compute_logits(model(step.ids, step.positions, self.runner.caches, metadata))
''',
        '''        hidden = model(step.ids, step.positions, self.runner.caches, metadata)
        return model.compute_logits(hidden[step.ends] if step.prompts else hidden)
''',
    ),
)


def propose(sources: dict[str, str], finding: dict) -> dict | list[dict]:
    """The series, or why there is none."""
    place = _place(sources)
    if isinstance(place, str):
        return _prompts(sources) or {"declined": place}
    series: list[dict] = []
    now = dict(sources)
    changed = gpu.paged_attention(now)
    if isinstance(changed, str):
        if "already" not in changed:
            return {"declined": f"a graph cannot hold this attention: {changed}"}
    else:
        now |= changed
        why = "the kernel masks by the lengths on the device"
        series.append(_member(changed, "Read the pages of the cache in place, without a length on the host", 0.0, why))
    changed = _capture(now)
    if isinstance(changed, str):
        return {"declined": changed}
    now |= changed
    graphs = _member(changed, "Replay decode steps as CUDA graphs, one per bucket of batch sizes", finding.get("bound_us"),
                   "every tensor of a decode step lies at the same address in each step", "rows that fill a bucket repeat the first sequence")  # fmt: skip
    graphs["also"] = ["launch-bound-decode", "comm-wait", "autograd-recording", "redundant-copies", "step-invariant-work", "unfused-chains", "split-products", "python-time", "allocations"]  # their host time: a replay has none
    graphs["activation"] = {
        "appear": [{"row": "cudaGraphLaunch", "phase": "decode", "ranks": "all"}],
        "vanish": [{"row": "cudaLaunchKernel*", "phase": "decode", "ranks": "all", "fewer": True}],
    }
    series.append(graphs)
    prompts = _prompts(now)
    return series if prompts is None else [*series, prompts]


def _prompts(sources: dict[str, str]) -> dict | None:
    """Graphs for steps with short prompts, on top of those for decode steps; None where attention splits by another name."""
    for file, text in sources.items():
        if not file.endswith("decode_graphs.py"):
            continue
        text, missing = gpu.replaced(text, PROMPTS, file, sources)
        if missing is not None or not t.parse_all(sources, "num_context_tokens: int"):
            return None
        last = _member({file: text, **_warmed(sources)}, "Replay steps with short prompts as CUDA graphs too, one per bucket of tokens", 0.0,
                       "a row of a prompt reads no position after its own", "prompts beyond 512 tokens a step are computed as before")  # fmt: skip
        last["activation"]["appear"] = [{"row": "cudaGraphLaunch", "phase": "decode", "ranks": "all"}]
        return last
    return None


def _warmed(sources: dict[str, str]) -> dict[str, str]:
    """The file whose `self.x = Runner(...)` makes the runner with graphs, recording them there; {} where none or several do."""
    classes = t.classes(t.parse_all(sources, "DecodeGraphs(self)"))
    runner = next((name for name, cls in classes.items() if "DecodeGraphs(self)" in t.code(cls.node)), None)
    found: list[tuple[str, str]] = []
    for file, tree in t.parse_all(sources, f"{runner}(").items():
        for cls in t.classes({file: tree}).values():
            for name, value in t.attributes_set(cls).items():
                if isinstance(value, cst.Call) and t.last_name(value.func) == runner:
                    made = next(s for s in cls.methods["__init__"].statements() if any(n is value for n in t.walk(s)))
                    lines = f"if self.{name}.graphs is not None:  # else the first requests would wait for it\n    self.{name}.graphs.warm()\n"
                    found.append((file, t.replace(tree, {made: lambda updated, lines=lines: [updated, *t.statements(lines)]}).code))
    return dict(found) if len(found) == 1 else {}


def _member(changed: dict[str, str], title: str, predicted: float | None, *invariants: str) -> dict:
    return {
        "sources": changed, "mechanism": "cuda-graph-capture", "title": title, "predicted_us": predicted,
        "invariants": list(invariants), "params": {}, "activation": {"appear": [], "vanish": []},
    }  # fmt: skip


def _place(sources: dict[str, str]) -> tuple[t.Function, list[cst.BaseStatement], str, str] | str:
    """(method, statements from prepare to logits, plan's name, name of the logits)."""
    trees = t.parse_all(sources, "compute_logits")
    for function in t.functions(trees):
        if "DecodeGraphs" in sources[function.file]:
            return "decode steps are replayed as graphs already"
        plan = next((p for p, a in function.params.items() if a == "StepPlan"), None)
        body = list(function.statements())
        named = [(t.assigned(s) or ("", None)) for s in body]
        first = next((n for n, (_, v) in enumerate(named) if v is not None and t.code(v) == f"self.prepare({plan})"), None)
        last = next((n for n, (_, v) in enumerate(named) if isinstance(v, cst.Call) and t.last_name(v.func) == "compute_logits"), None)
        if plan is None or first is None or last is None or first > last or not all(name for name, _ in named[first : last + 1]):
            continue
        used = {n.value for s in body[last + 1 :] for n in t.walk(s) if isinstance(n, cst.Name)}
        inner = {name for name, _ in named[first:last]}
        if used & inner:
            return f"{function.cls}.{function.name} needs {sorted(used & inner)[0]} after the logits"
        return function, body[first : last + 1], plan, named[last][0]
    return "no method turns a StepPlan into logits by prepare, the model and compute_logits"


def _capture(sources: dict[str, str]) -> dict[str, str] | str:
    place = _place(sources)
    if isinstance(place, str):
        return place
    function, _, plan, logits = place
    file = function.file
    cls = t.classes({file: cst.parse_module(sources[file])})[function.cls]
    graphs = gpu.new_file(sources, file, "decode_graphs")
    attributes = {"tp", "model", "caches", "block_size", "newest"}
    missing = sorted(attributes - t.attributes_set(cls).keys())
    if graphs in sources or missing or "prepare" not in cls.methods:
        return f"{graphs} is there already" if graphs in sources else f"{function.cls} has no {', '.join(missing) or 'prepare'}"
    changed = {graphs: gpu.local_names(GRAPHS, file, sources), file: _runner(sources, file, function, logits, plan)}
    return {**changed, **_told(sources)}


def _runner(sources: dict[str, str], file: str, found: t.Function, logits: str, plan: str) -> str:
    """The runner with graphs made in __init__ and asked before the eager way."""
    tree = cst.parse_module(sources[file])
    cls = t.classes({file: tree})[found.cls]
    place = _place({file: sources[file]})
    assert not isinstance(place, str)
    step = cls.methods[found.name]
    names = [t.code(s) for s in place[1]]
    body = [s for s in step.statements() if t.code(s) in names]
    eager = [s.with_changes(leading_lines=[]) for s in body]
    test = cst.parse_statement(f"if {logits} is None:  # prompts, a large batch, no GPU: operator by operator\n    pass\n")
    assert isinstance(test, cst.If) and isinstance(test.body, cst.IndentedBlock)
    ask = t.statements(f"{logits} = self.graphs.logits({plan}) if self.graphs is not None else None\n")
    new: dict[cst.CSTNode, object] = {s: cst.RemoveFromParent() for s in body[1:]}
    new[body[0]] = [*ask, test.with_changes(body=test.body.with_changes(body=eager))]
    init = cls.methods["__init__"].statements()[-1]
    line = 'self.graphs = DecodeGraphs(self) if self.tp.device.type == "cuda" else None\n'
    new[init] = lambda updated: [updated, *t.statements(line)]
    folder = file.rpartition("/")[0].replace("/", ".")
    return t.add_import(t.replace(tree, new), f"from {folder}.decode_graphs import DecodeGraphs" if folder else "from decode_graphs import DecodeGraphs").code


def _told(sources: dict[str, str]) -> dict[str, str]:
    """The server's own description says so: `"cuda_graph": False` becomes what the device allows."""
    for file, tree in t.parse_all(sources, '"cuda_graph": False').items():
        new: dict[cst.CSTNode, object] = {}
        for function in t.functions({file: tree}):
            kinds = [p[0] for s in function.statements() if (p := t.assigned(s)) and t.code(p[1]).endswith('.device.type == "cuda"')]
            for node in t.walk(function.node):
                if kinds and isinstance(node, cst.DictElement) and t.code(node.key) == '"cuda_graph"':
                    new[node.value] = cst.Name(kinds[0])
        if new:
            return {file: t.replace(tree, new).code}
    return {}
