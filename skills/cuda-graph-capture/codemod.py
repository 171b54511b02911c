"""Record the decode step once per bucket of batch sizes as a CUDA graph, and launch that instead of its kernels.

A series, each member passing alone: attention that reads no length on the host; the graphs. The first is left out where
it is there already. Looked for: a runner whose method turns a plan of context and generation items into logits by
`prepare`, the model and `compute_logits`.
"""

from __future__ import annotations

import codemod_tools as t
import gpu_tools as gpu
import libcst as cst

GRAPHS = '''"""Decode steps as CUDA graphs: one per bucket of batch sizes, captured when its size first comes, replayed from then on.

A step's numbers go to the device in one copy, to an address that the graph knows. Rows that fill up a bucket repeat
the first sequence: they write the same key to the same slot. Not for: steps with prompts or larger batches; for those
`logits` returns None and the caller computes them operator by operator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.attention import AttentionMetadata
from engine.request import GenerationItem, StepPlan

BUCKETS = (1, 2, 4, 8, 16, 24, 32)
LEAST_PAGES = 64  # width of the page tables; it doubles when a sequence needs more
PATIENCE = 8  # steps of a new size that borrow a larger graph before they get their own


class _Step:
    """Memory of one graph: numbers on the host and on the device, and what comes out."""

    def __init__(self, size: int, pages: int, device: torch.device) -> None:
        self.size = size
        split, end = 8 * 3 * size, 8 * 3 * size + 4 * size * (1 + pages)
        self.host = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.there = torch.zeros(end, dtype=torch.uint8, device=device)
        self.wide, self.counts, self.rows = (part.numpy() for part in self._cut(self.host, split, size))
        wide, self.lengths, self.tables = self._cut(self.there, split, size)
        self.ids, self.positions, self.slots = wide
        self.graph: Any = None
        self.logits: torch.Tensor | None = None

    @staticmethod
    def _cut(data: torch.Tensor, split: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        narrow = data[split:].view(torch.int32)
        return data[:split].view(torch.int64).view(3, size), narrow[:size], narrow[size:].view(size, -1)

    def fill(self, items: list[GenerationItem], newest: dict[int, int], block_size: int) -> None:
        """The last step's tokens were read back, so the last copy has run and its source may be overwritten."""
        for row, item in enumerate(items):
            table, at = item.block_table, item.position
            slot = table[at // block_size] * block_size + at % block_size
            self.wide[:, row] = newest[item.seq_id], at, slot
            self.counts[row] = at + 1
            self.rows[row, : len(table)] = table
        self.there.copy_(self.host, non_blocking=True)


class DecodeGraphs:
    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.steps: dict[tuple[int, int], _Step] = {}
        self.wanted = dict.fromkeys(BUCKETS, 0)
        self.pool: Any = None  # shared: one graph runs at a time

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor | None:
        """[G, vocab] of a step without prompts, valid until the next call; None when the caller must compute it."""
        items = plan.generation
        if plan.context or not items or len(items) > BUCKETS[-1]:
            return None
        size = next(bucket for bucket in BUCKETS if bucket >= len(items))
        pages = max(len(item.block_table) for item in items)
        key = size, max(LEAST_PAGES, 1 << (pages - 1).bit_length())
        larger = [k for k in self.steps if k[0] >= size and k[1] >= pages]
        self.wanted[size] += 1
        if larger and key not in self.steps and self.wanted[size] < PATIENCE:
            key = min(larger)
        step = self.steps.get(key) or _Step(*key, self.runner.tp.device)
        step.fill([*items, *items[:1] * (step.size - len(items))], self.runner.newest, self.runner.block_size)
        if step.graph is None:
            self.capture(step, plan)
            self.steps[key] = step
        step.graph.replay()
        assert step.logits is not None
        return step.logits[: len(items)]

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


def propose(sources: dict[str, str], finding: dict) -> dict | list[dict]:
    """The series, or why there is none."""
    place = _place(sources)
    if isinstance(place, str):
        return {"declined": place}
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
    last = _member(changed, "Replay decode steps as CUDA graphs, one per bucket of batch sizes", finding.get("bound_us"),
                   "every tensor of a decode step lies at the same address in each step", "rows that fill a bucket repeat the first sequence")  # fmt: skip
    last["activation"] = {
        "appear": [{"row": "cudaGraphLaunch", "phase": "decode", "ranks": "all"}],
        "vanish": [{"row": "cudaLaunchKernel*", "phase": "decode", "ranks": "all", "fewer": True}],
    }
    return [*series, last]


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
