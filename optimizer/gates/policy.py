"""G02: what changed source may not say. A hint and a route to a person, never the only defence.

Compares what the rules find in the changed files before and after: only new findings count, so an engine may keep
what it had. `reject` rules have no honest use in an engine's hot path; `ask` rules park the patch for a person.
Not for: behaviour. Whoever hides from these rules still meets the oracle, the sandbox and the outside clock.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from optimizer.confine.sandbox import OTHER_ENGINES
from optimizer.gates.context import Lab, failed, parked, passed
from optimizer.gates.scope import Change, _show, changes
from optimizer.types import GateResult, RejectReason

REJECT, ASK = "reject", "ask"
# Dotted names; a name covers everything below it. First match wins.
RULES: tuple[tuple[str, str, str], ...] = (
    *((name, REJECT, "another engine") for name in OTHER_ENGINES),
    *((name, REJECT, "starts processes") for name in ("subprocess", "pty", "os.system", "os.popen", "os.fork",
      "os.forkpty", "os.posix_spawn", "os.posix_spawnp", "os.execv", "os.execve", "os.execvp", "os.execvpe", "os.execl",
      "os.execle", "os.execlp", "os.execlpe", "os.spawnl", "os.spawnle", "os.spawnv", "os.spawnve", "os.kill",
      "os.killpg", "asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell")),
    *((name, REJECT, "network") for name in ("socket", "urllib", "http", "ftplib", "smtplib", "ssl", "requests", "httpx",
      "aiohttp", "xmlrpc", "websockets")),
    *((name, REJECT, "reads frames or other code") for name in ("gc", "inspect", "sys._getframe", "sys._current_frames",
      "sys.settrace", "sys.setprofile", "traceback.extract_stack", "linecache", "dis", "tracemalloc", "faulthandler")),
    *((name, REJECT, "import machinery") for name in ("sys.modules", "sys.meta_path", "sys.path", "sys.path_hooks", "builtins",
      "__builtins__", "__import__", "imp", "runpy", "pkgutil", "zipimport", "code", "site")),
    *((name, REJECT, "runs text as code") for name in ("eval", "exec", "compile")),
    *((name, REJECT, "changes the environment") for name in ("os.putenv", "os.unsetenv", *(f"os.environ{b}.{method}" for b in ("", "b")
      for method in ("setdefault", "update", "pop", "popitem", "clear", "__setitem__", "__delitem__", "__ior__")))),
    *((name, ASK, "reads the environment") for name in ("os.environ", "os.environb", "os.getenv", "os.getenvb")),
    *((name, REJECT, "ends the process or handles signals") for name in ("os._exit", "os.abort", "signal", "atexit")),
    *((name, REJECT, "asks whether a profiler is active") for name in ("torch.autograd._profiler_enabled",
      "torch._C._autograd._profiler_enabled", "torch._C._autograd._profiler_type", "torch._C._profiler_enabled",
      "torch._C._profiler._profiler_enabled", "torch.autograd.profiler._is_profiler_enabled", "torch.autograd.profiler.kineto_available",
      "torch.autograd._kineto_step", "torch.autograd.profiler._current_profiler", "torch.profiler._utils")),
    *((name, REJECT, "asks for the probes of a gate") for name in ("torch.are_deterministic_algorithms_enabled",
      "torch.is_deterministic_algorithms_warn_only_enabled", "torch.utils.deterministic", "torch.use_deterministic_algorithms")),
    *((name, REJECT, "loads native code") for name in ("torch.ops.load_library", "torch.classes", "cffi", "ctypes.pythonapi")),
    *((name, ASK, "native code") for name in ("ctypes", "torch.utils.cpp_extension", "cupy", "pycuda")),
    *((name, ASK, "reads a clock or sleeps") for name in ("time", "datetime", "timeit", "torch.cuda.Event.elapsed_time")),
    *((name, ASK, "dynamic import") for name in ("importlib",)),
    *((name, ASK, "reads or writes files") for name in ("open", "io.open", "os.open", "pathlib", "shutil", "tempfile", "pickle",
      "torch.save", "torch.load", "sqlite3", "shelve", "dbm", "mmap", "numpy.fromfile", "numpy.load", "numpy.loadtxt",
      "numpy.memmap", "os.listdir", "os.scandir", "os.walk", "os.rename", "os.symlink", "os.link",
      "os.mkdir", "os.makedirs", "os.mkfifo", "os.memfd_create", "os.replace")),
    *((name, ASK, "changes a setting of the whole process") for name in ("torch.set_num_threads", "torch.set_num_interop_threads",
      "torch.set_float32_matmul_precision", "torch.set_flush_denormal", "os.sched_setaffinity", "os.sched_setscheduler",
      "os.nice", "os.setpriority", "resource", "sys.setswitchinterval", "threading.setprofile", "threading.settrace")),
    *((name, ASK, "starts a thread or a process") for name in ("threading.Thread", "threading.Timer", "_thread", "multiprocessing",
      "concurrent.futures", "torch.multiprocessing")),
    *((name, ASK, "random numbers for the whole process") for name in ("random.seed", "torch.manual_seed", "numpy.random.seed")),
)  # fmt: skip
_BY_NAME = {name: (action, why) for name, action, why in reversed(RULES)}
# Modules that stand inside others (`torch.os`): a chain through one is judged from there on, and as a bare value it is
# handed on to where no rule follows it.
_INNER = frozenset((
    "os", "sys", "subprocess", "socket", "gc", "ctypes", "builtins", "inspect", "shutil", "importlib", "pathlib", "time",
    "multiprocessing",
))  # fmt: skip
_BUILTINS = ("eval", "exec", "compile", "open", "__import__", "__builtins__")
# Attributes that lead from an object to code, frames or names that were not given to it.
_INSIDES = frozenset((
    "__subclasses__", "__globals__", "__builtins__", "__mro__", "__bases__", "__code__", "__closure__",
    "__defaults__", "__kwdefaults__", "__loader__", "__spec__", "__getattribute__", "__reduce__", "__reduce_ex__",
    "f_back", "f_globals", "f_locals", "f_builtins", "gi_frame", "cr_frame", "tb_frame", "tb_next",
))  # fmt: skip
_FILE_METHODS = frozenset((
    "read_text", "read_bytes", "write_text", "write_bytes", "iterdir", "rglob", "symlink_to", "hardlink_to",
    "touch", "tofile",
))  # fmt: skip
_DIGEST = re.compile(r"(sha\d+:)?[0-9a-fA-F]{32,}")
_STATE_WORDS = ("profiler_enabled", "profiler_type", "kineto_available", "is_profiling")
LONG_TEXT, LONG_BYTES, MANY_NUMBERS, STORED_NUMBERS = 240, 64, 24, 16
# Places of the machine that an engine reaches through its arguments or not at all.
_PLACES = (
    "/proc", "/sys", "/etc", "/usr", "/root", "/home", "/opt", "/var", "/mnt", "/srv", "/data", "/boot", "/bin", "/lib",
    "/weights", "/io", "/candidate", "/launcher.py",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    action: str
    why: str
    what: str
    line: int

    @property
    def key(self) -> tuple[str, str, str]:
        return self.action, self.why, self.what


def check(lab: Lab) -> GateResult:
    ctx = lab.ctx
    found = new_findings(
        {c.path: source for c, source in _sources(lab, ctx.base_commit) if c.status == "M"},
        {c.path: source for c, source in _sources(lab, ctx.candidate_commit)},
    )
    facts = {"findings": [f"{path}:{f.line}: {f.what} ({f.why})" for path, f in found]}
    for action, verdict in ((REJECT, failed), (ASK, parked)):
        first = next(((path, f) for path, f in found if f.action == action), None)
        if first:
            path, f = first
            return verdict(
                "policy", "G02", RejectReason.POLICY, f"{path}:{f.line}: {f.what} ({f.why})", **facts
            )
    return passed("policy", "G02")


def _sources(lab: Lab, commit: str) -> Iterable[tuple[Change, str]]:
    ctx = lab.ctx
    for change in changes(ctx.repo, ctx.base_commit, ctx.candidate_commit):
        if change.path.endswith(".py") and (change.status == "M" or commit == ctx.candidate_commit):
            yield change, _show(ctx.repo, commit, change.path)


def new_findings(before: dict[str, str], after: dict[str, str]) -> list[tuple[str, Finding]]:
    """What the rules find in `after` beyond what they find in `before`, over all files together."""
    had = Counter(f.key for source in before.values() for f in findings(source))
    new: list[tuple[str, Finding]] = []
    for path, source in after.items():
        for finding in findings(source):
            if had[finding.key] > 0:
                had[finding.key] -= 1
            else:
                new.append((path, finding))
    return new


def findings(source: str) -> list[Finding]:
    """Everything the rules find in one file. Text that is no Python has been refused by G01."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    visitor = _Visitor(_docstrings(tree))
    visitor.visit(tree)
    return visitor.found


class _Visitor(ast.NodeVisitor):
    def __init__(self, docstrings: set[int]) -> None:
        self.names: dict[str, str] = {}  # local name -> dotted origin, imports only
        self.found: list[Finding] = []
        self._docstrings = docstrings

    def add(self, node: ast.AST, action: str, why: str, what: str) -> None:
        self.found.append(Finding(action, why, what, getattr(node, "lineno", 0)))

    def match(self, node: ast.AST, dotted: str) -> bool:
        dotted = inner_module(dotted)
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            rule = _BY_NAME.get(".".join(parts[:end]))
            if rule:
                self.add(node, *rule, dotted)
                return True
        return False

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.names[alias.asname or alias.name.split(".")[0]] = (
                alias.name if alias.asname else alias.name.split(".")[0]
            )
            self.match(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            dotted = f"{node.module}.{alias.name}" if node.module and not node.level else ""
            if dotted:
                self.names[alias.asname or alias.name] = dotted
                self.match(node, dotted)
            if alias.name == "*":
                self.add(node, ASK, "imports everything", f"from {node.module} import *")

    def dotted(self, node: ast.AST) -> str | None:
        """The origin of a name or attribute chain that starts at an import or a builtin."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        root = self.names.get(
            node.id,
            node.id if node.id in _BUILTINS else None,
        )
        return None if root is None else ".".join([root, *reversed(parts)])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = self.dotted(node)
        if any(word in node.attr for word in _STATE_WORDS):
            self.add(node, REJECT, "asks whether a profiler is active", dotted or node.attr)
            return
        if node.attr in _INSIDES:
            self.add(node, REJECT, "reads frames or other code", node.attr)
        elif node.attr in _FILE_METHODS:
            self.add(node, ASK, "reads or writes files", node.attr)
        if dotted is None:
            self.generic_visit(node)
        else:
            self.match(node, dotted)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id not in self.names and isinstance(node.ctx, ast.Load):
            dotted = self.dotted(node)
            if dotted:
                self.match(node, dotted)
        elif isinstance(node.ctx, ast.Load):  # attributes of a module do not come here: this is the module itself
            origin = inner_module(self.names[node.id])
            if origin in _INNER:
                self.add(node, ASK, "hands a module on", origin)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if (
            name in ("getattr", "setattr", "delattr", "vars")
            and node.args
            and (module := self.dotted(node.args[0]))
        ):
            constant = len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
            if name != "getattr":
                self.add(node, REJECT, "changes another module", f"{name}({module}, ...)")
            elif constant:
                self.match(node, f"{module}.{node.args[1].value}")  # type: ignore[attr-defined]
            else:
                self.add(node, ASK, "looks names up at run time", f"getattr({module}, ...)")
        if self._one_thread(node):
            return
        if name in ("globals", "locals") and isinstance(node.func, ast.Name):
            self.add(node, ASK, "looks names up at run time", f"{name}()")
        self.generic_visit(node)

    def _one_thread(self, node: ast.Call) -> bool:
        """`torch.set_num_threads(1)` is what every rank is to have anyway."""
        values = [a.value for a in node.args if isinstance(a, ast.Constant)]
        return self.dotted(node.func) in ("torch.set_num_threads", "torch.set_num_interop_threads") and values == [1]

    def _assigned(self, target: ast.AST) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for item in target.elts:
                self._assigned(item)
            return
        inner = target.value if isinstance(target, ast.Subscript) else target
        of_module = isinstance(inner, ast.Attribute) or isinstance(target, ast.Subscript)
        dotted = self.dotted(inner) if of_module else None
        if dotted is None or dotted in _BUILTINS:
            return
        dotted = inner_module(dotted)
        if dotted.startswith("os.environ"):
            self.add(target, REJECT, "changes the environment", dotted)
        elif dotted.startswith(("torch.backends.", "torch._dynamo.config.", "torch._inductor.config.")):
            self.add(target, ASK, "changes a numeric or compiler setting", dotted)
        else:
            self.add(target, REJECT, "changes another module", dotted)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assigned(target)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._assigned(node.target)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assigned(node.target)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._assigned(target)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, str) and id(node) not in self._docstrings:
            if _DIGEST.fullmatch(value):
                self.add(node, ASK, "looks like a digest of something known", value[:60])
            elif _is_place(value):
                self.add(node, REJECT, "names a place of the machine", value[:60])
            elif len(value) >= LONG_TEXT and _entropy(value) > 4.5:
                self.add(node, ASK, "long literal", f"{len(value)} characters of text")
        elif isinstance(value, bytes) and len(value) >= LONG_BYTES:
            self.add(node, ASK, "long literal", f"{len(value)} bytes")
        elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
            self.add(node, ASK, "long literal", f"a number of {value.bit_length()} bits")

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Text that is put together from constants is read as a whole."""
        if (text := _joined(node)) is not None and _is_place(text):
            self.add(node, REJECT, "names a place of the machine", text[:60])
        else:
            self.generic_visit(node)

    def _numbers(self, node: ast.AST, items: Iterable[ast.AST | None]) -> None:
        constants = [i.value for i in items if isinstance(i, ast.Constant)]
        numbers = [v for v in constants if isinstance(v, int | float) and not isinstance(v, bool)]
        whole = all(type(n) is int for n in numbers)
        if len(numbers) >= STORED_NUMBERS and whole and sorted(numbers) not in (numbers, numbers[::-1]):
            self.add(
                node, REJECT, "looks like stored tokens", f"a table of {len(numbers)} unsorted whole numbers"
            )
        elif len(numbers) >= MANY_NUMBERS:
            self.add(node, ASK, "long literal", f"a table of {len(numbers)} numbers")

    def visit_List(self, node: ast.List) -> None:
        self._numbers(node, node.elts)
        self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        self._numbers(node, node.elts)
        self.generic_visit(node)

    def visit_Set(self, node: ast.Set) -> None:
        self._numbers(node, node.elts)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        self._numbers(node, [*node.keys, *node.values])
        self.generic_visit(node)


def inner_module(dotted: str) -> str:
    """`torch.os.environ` -> `os.environ`: a module is judged wherever it is reached from."""
    parts = dotted.split(".")
    at = max((i for i, part in enumerate(parts) if part.lstrip("_") in _INNER), default=0)
    return ".".join([parts[at].lstrip("_") if at else parts[0], *parts[at + 1 :]])


def _joined(node: ast.AST) -> str | None:
    """The value of a sum of string constants, else None."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _joined(node.left), _joined(node.right)
        return None if left is None or right is None else left + right
    return None


def _is_place(text: str) -> bool:
    return any(text == place or text.startswith(place + "/") for place in _PLACES) or "site-packages" in text


def _docstrings(tree: ast.AST) -> set[int]:
    """Nodes of docstrings and of other strings that stand alone."""
    return {
        id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
    }


def _entropy(text: str) -> float:
    """Shannon entropy, in bits a character."""
    total = len(text)
    return -sum(n / total * math.log2(n / total) for n in Counter(text).values())
