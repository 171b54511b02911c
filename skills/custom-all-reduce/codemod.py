"""Send a tensor-parallel group's small collectives through memory that all ranks see, instead of a library's transport.

Finds calls of torch.distributed's collectives by what the name resolves to, points them at a new module with the
same signatures, and lets an `all_reduce_backend` entry of the server's metadata say so. On a CPU: all_reduce,
all_gather and broadcast through shared memory. On GPUs: all_reduce by PyTorch's symmetric memory. Both fall back to
torch.distributed for everything that they do not do.
"""

from __future__ import annotations

import codemod_tools as t
import libcst as cst

PARAMS = {"slot_kib": [1024]}
MODULE = "shm_collectives"
TARGETS = {f"torch.distributed.{name}": name for name in ("all_reduce", "all_gather", "broadcast")}
MAX_CALLERS = 2  # with the new module, the envelope's three files

TEMPLATE = '''"""Collectives between the ranks of one host through shared memory, for small CPU tensors.

Each rank writes its own slot, publishes its turn and waits for the others' turns; sums run in rank order, so
every rank gets the same bits. Slots are double: a rank can only overwrite what all have read, because it has
seen everybody enter the turn in between. Relies on x86-64's store order. What does not fit (device, operation,
size, several hosts) takes torch.distributed. Not for: sending anything between hosts.
"""

import os
import threading

import torch
import torch.distributed as dist
from torch._C._profiler import _RecordFunctionFast as span

SLOT_BYTES = @SLOT_KIB@ * 1024
SPINS = 20  # looks at a peer's turn before the core is given away
YIELDS = 20_000  # then the rank sleeps: an idle engine must not burn its cores
AVAILABLE = os.uname().machine == "x86_64" and os.path.isdir("/dev/shm")
_rooms: dict = {}


class _Room:
    """One group's shared memory: [2 turns, ranks, SLOT_BYTES] of slots, then one cache line of turn per rank."""

    def __init__(self, group) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        name = [f"/dev/shm/ranks-{os.getpid()}-{len(_rooms)}"]
        dist.broadcast_object_list(name, src=dist.get_global_rank(group or dist.group.WORLD, 0), group=group)
        slots = 2 * self.size * SLOT_BYTES
        memory = torch.from_file(name[0], shared=True, size=slots + 64 * self.size, dtype=torch.uint8)
        if self.rank == 0:
            memory[-1] = 1
        dist.barrier(group)
        mark = memory[-1:].int()  # stays 0 on another host
        dist.all_reduce(mark, dist.ReduceOp.MIN, group)
        self.shared = bool(mark.item())
        if self.rank == 0:
            os.unlink(name[0])
        self.slots = memory[:slots].view(2, self.size, SLOT_BYTES)
        self.turns = memoryview(memory[slots:].view(torch.int64).numpy())
        self.turn, self.views = 0, {}

    def write(self, tensor, mine: bool = True):
        """Publish this rank's slot, wait until every rank has, and return the slots as [ranks, *shape]."""
        self.turn += 1
        key = (self.turn & 1, tensor.shape, tensor.dtype)
        if key not in self.views:
            slots = self.slots[self.turn & 1].view(tensor.dtype)[:, : tensor.numel()]
            self.views[key] = slots.view(self.size, *tensor.shape)
        slots = self.views[key]
        if mine:
            slots[self.rank].copy_(tensor.detach())
        turns, turn = self.turns, self.turn
        turns[8 * self.rank] = turn
        for peer in range(0, 8 * self.size, 8):
            looks = 0
            while turns[peer] < turn:
                looks += 1
                if looks > YIELDS:
                    threading.Event().wait(0.0005)
                elif looks > SPINS:
                    os.sched_yield()
        return slots


def _room(tensor, group, fits: bool):
    """The group's shared memory if this tensor can go through it; the answer is the same on every rank."""
    if not (fits and AVAILABLE) or tensor.device.type != "cpu" or tensor.nbytes > SLOT_BYTES:
        return None
    if group not in _rooms:
        _rooms[group] = _Room(group)
    return _rooms[group] if _rooms[group].shared else None


def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    room = _room(tensor, group, op == dist.ReduceOp.SUM and not async_op)
    if room is None:
        return dist.all_reduce(tensor, op, group, async_op)
    with span("shm::all_reduce"):
        torch.sum(room.write(tensor), 0, out=tensor.detach())


def all_gather(tensor_list, tensor, group=None, async_op=False):
    room = _room(tensor, group, not async_op)
    if room is None:
        return dist.all_gather(tensor_list, tensor, group, async_op)
    with span("shm::all_gather"):
        for part, slot in zip(tensor_list, room.write(tensor), strict=True):
            part.detach().copy_(slot)


def broadcast(tensor, src=None, group=None, async_op=False):
    room = _room(tensor, group, group is None and src is not None and not async_op)
    if room is None:
        return dist.broadcast(tensor, src, group, async_op)
    with span("shm::broadcast"):
        slots = room.write(tensor, mine=room.rank == src)
        if room.rank != src:
            tensor.detach().copy_(slots[src])
'''


GPU_MODULE = "symm_collectives"
GPU_TEMPLATE = '''"""All-reduce of small bfloat16 tensors between the GPUs of one host, in one kernel over PyTorch's symmetric memory.

Each program writes its words into every peer's inbox with the number of the turn beside each, and takes the peers' words
from its own as they come: nobody waits for a barrier, and no flag travels apart from what it announces. Inboxes are double:
a rank writes into one again only after it has seen what each peer sent in the turn between. Sums run in rank order, so every
rank gets the same bits. Calls of one group must not overlap on a rank. What does not fit takes torch.distributed. Inboxes are
made at the first call: before any graph capture, which needs a warm-up anyway. Not for: several hosts.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch for CPUs
    triton = None

MAX_BYTES = @SLOT_KIB@ * 512  # above it the library moves fewer bytes
WORDS = 512  # of 4 bytes: what one program sends
AVAILABLE = triton is not None  # of CUDA nothing is asked here: ranks are forked from a process that may not begin it
_rooms: dict = {}


class _Room:
    """One group's inboxes [2 turns, senders, words], where those of all ranks lie, and the turn of each program."""

    def __init__(self, group, device) -> None:
        group = group or dist.group.WORLD
        self.rank, self.size, words = dist.get_rank(group), dist.get_world_size(group), MAX_BYTES // 4
        self.inbox = symm_mem.empty(2 * self.size * words, dtype=torch.int64, device=device)
        self.inbox.zero_()
        torch.cuda.synchronize(device)  # before any peer knows where it lies
        handle = symm_mem.rendezvous(self.inbox, group)
        found = [handle.get_buffer(r, self.inbox.shape, torch.int64).data_ptr() for r in range(self.size)]
        self.inboxes = torch.tensor(found, dtype=torch.int64, device=device)
        self.turns = torch.zeros(words // WORDS, dtype=torch.int32, device=device)
        self.ahead = torch.cuda.get_device_capability(device) >= (9, 0)


def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    plain = AVAILABLE and op == dist.ReduceOp.SUM and not async_op and tensor.is_cuda and tensor.is_contiguous()
    if not plain or tensor.dtype != torch.bfloat16 or tensor.nbytes > MAX_BYTES or tensor.nbytes % 16 or tensor.data_ptr() % 16:
        return dist.all_reduce(tensor, op, group, async_op)
    if group not in _rooms:
        _rooms[group] = _Room(group, tensor.device)
    room, words = _rooms[group], tensor.detach().view(-1).view(torch.int32)
    one_shot_all_reduce[(triton.cdiv(words.numel(), WORDS),)](
        words, room.inbox, room.inboxes, room.turns, words.numel(), RANK=room.rank, RANKS=room.size, MOST=MAX_BYTES // 4,
        WORDS=WORDS, AHEAD=room.ahead, launch_pdl=room.ahead, num_warps=4,
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def one_shot_all_reduce(words, inbox, inboxes, turns, count, RANK: tl.constexpr, RANKS: tl.constexpr, MOST: tl.constexpr,
                            WORDS: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
        if AHEAD:  # the next kernel may be set up; what this one reads must be there
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        part = tl.program_id(0)
        i = part * WORDS + tl.arange(0, WORDS)
        inside = i < count
        turn = tl.load(turns + part) + 1
        mine = tl.load(words + i, mask=inside, other=0)
        low, high = exchanged(mine, inbox, inboxes, turn, i, inside, RANK, RANKS, MOST)
        tl.store(words + i, packed(low, high), mask=inside)
        tl.store(turns + part, turn)

    @triton.jit
    def exchanged(mine, inbox, inboxes, turn, i, inside, RANK: tl.constexpr, RANKS: tl.constexpr, MOST: tl.constexpr):
        """Float32 sums over the ranks of the first and of the second number of each word; `i` is the word's place in an inbox."""
        room = (turn & 1) * (RANKS * MOST) + i
        marked = (turn.to(tl.int64) << 32) | (mine.to(tl.int64) & 0xFFFFFFFF)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                there = tl.load(inboxes + peer).to(tl.pointer_type(tl.int64))
                tl.store(there + room + RANK * MOST, marked, mask=inside, cache_modifier=".wt")
        low, high = tl.zeros_like(first(mine)), tl.zeros_like(first(mine))
        for peer in tl.static_range(RANKS):
            got = mine
            if peer != RANK:
                here = inbox + room + peer * MOST
                came = tl.load(here, mask=inside, other=0, volatile=True)
                while tl.sum((((came >> 32).to(tl.int32) != turn) & inside).to(tl.int32), 0) > 0:
                    came = tl.load(here, mask=inside, other=0, volatile=True)
                got = came.to(tl.int32)
            low += first(got)
            high += second(got)
        return low, high

    @triton.jit
    def first(words):
        return (words << 16).to(tl.float32, bitcast=True)

    @triton.jit
    def second(words):
        return (words & -65536).to(tl.float32, bitcast=True)

    @triton.jit
    def packed(low, high):
        word = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16) | word
'''


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch; see the module docstring."""
    for module in (MODULE, GPU_MODULE):
        if any(file.rsplit("/", 1)[-1] == f"{module}.py" for file in sources):
            return {"declined": f"{module}.py is already there"}
    on_gpu = finding.get("device") == "cuda"
    if on_gpu and finding.get("rule") in ("comm-wait", "straggler-rank") and "custom-all-reduce" not in finding.get("skills", ()):
        return {"declined": "ranks wait for hosts that launch kernel by kernel; a faster sum does not bring them together"}
    module, template = (GPU_MODULE, GPU_TEMPLATE) if on_gpu else (MODULE, TEMPLATE)
    targets = {k: v for k, v in TARGETS.items() if v == "all_reduce" or not on_gpu}
    changed: dict[str, str] = {}
    for file in sorted(sources):
        if file.endswith(".py") and "all_reduce" in sources[file] and "torch" in sources[file]:
            text = _redirect(file, sources, module, targets)
            if text is not None:
                changed[file] = text
    if not changed:
        return {"declined": "no synchronous torch.distributed.all_reduce with a plain sum"}
    if len(changed) > MAX_CALLERS:
        return {"declined": f"all_reduce is called in {len(changed)} files; gather the calls in one first"}
    home = next(iter(changed)).rpartition("/")[0]
    slot_kib = finding.get("params", {}).get("slot_kib", PARAMS["slot_kib"][0])
    changed[f"{home}/{module}.py".lstrip("/")] = template.replace("@SLOT_KIB@", str(slot_kib))
    if len(changed) < 1 + MAX_CALLERS:
        changed.update(_metadata(sources, changed, module))
    bound = finding.get("bound_us")
    kernel, library = ("*one_shot_all_reduce*", "nccl*AllReduce*") if on_gpu else ("shm::all_reduce", "c10d::allreduce_")
    return {
        "sources": changed,
        "mechanism": "custom-all-reduce",
        "title": "Sum between GPUs by symmetric memory" if on_gpu else "Meet in shared memory instead of over sockets",
        "predicted_us": None if bound is None else 0.9 * bound,
        "invariants": ["every rank gets the same bits", "sums run in rank order", "other shapes and devices fall back"],
        "params": {"slot_kib": slot_kib},
        "activation": {
            "appear": [{"row": kernel, "phase": "decode", "ranks": "all"}],
            "vanish": [{"row": library, "phase": "decode", "ranks": "all"}],
        },
    }


def _redirect(file: str, sources: dict[str, str], module: str, targets: dict[str, str]) -> str | None:
    """The file with its calls pointed at the new module, or None when it has no plain all_reduce."""
    tree = cst.parse_module(sources[file])
    known = t.imports(tree)
    edits: dict[cst.CSTNode, object] = {}
    found: set[str] = set()
    for node in t.walk(tree):
        name = targets.get(t.qualified(node.func, known)) if isinstance(node, cst.Call) else None
        if isinstance(node, cst.Call) and name is not None and _plain(node):
            edits[node.func] = cst.Attribute(cst.Name(module), cst.Name(name))
            found.add(name)
    if "all_reduce" not in found:
        return None
    return t.add_import(t.replace(tree, edits), t.sibling_import(file, sources, module)).code


def _plain(call: cst.Call) -> bool:
    """No operation but the sum, nothing asynchronous, nothing unpacked."""
    for n, arg in enumerate(call.args):
        name = arg.keyword.value if arg.keyword else None
        if arg.star or (name == "async_op" and not _is_name(arg.value, "False")):
            return False
        operation = name == "op" or (name is None and n == 1 and isinstance(arg.value, cst.Attribute))
        if operation and not (isinstance(arg.value, cst.Attribute) and arg.value.attr.value in ("SUM", "group")):
            return False
    return True


def _is_name(node: cst.BaseExpression, name: str) -> bool:
    return isinstance(node, cst.Name) and node.value == name


def _metadata(sources: dict[str, str], changed: dict[str, str], module: str) -> dict[str, str]:
    """The one dict entry "all_reduce_backend" of the sources, made to tell the truth; {} when there is none."""
    for file in sorted(sources):
        if not file.endswith(".py") or '"all_reduce_backend"' not in sources[file]:
            continue
        replacer = _Backend(module)
        tree = cst.parse_module(changed.get(file, sources[file])).visit(replacer)
        if replacer.hits == 1:
            return {file: (tree if file in changed else t.add_import(tree, t.sibling_import(file, sources, module))).code}
    return {}


class _Backend(cst.CSTTransformer):
    """{"all_reduce_backend": x} -> {"all_reduce_backend": "shm" if ... x == "gloo" else x}, or as it is on GPUs."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.module, self.hits = module, 0

    def leave_DictElement(self, original_node: cst.DictElement, updated_node: cst.DictElement) -> cst.DictElement:
        key = original_node.key
        if not isinstance(key, cst.SimpleString) or key.evaluated_value != "all_reduce_backend":
            return updated_node
        self.hits += 1
        value = cst.Module([]).code_for_node(updated_node.value)
        old, new = ("nccl", "symm_mem") if self.module == GPU_MODULE else ("gloo", "shm")
        test = f'{self.module}.AVAILABLE and {value} == "{old}"'
        return updated_node.with_changes(value=cst.parse_expression(f'"{new}" if {test} else {value}'))
