"""Where a candidate runs: the strongest confinement this machine offers, as an argv to start.

The ladder, best first: `bwrap` (bubblewrap), `namespaces` (the same by `jail.py`, without bubblewrap),
`landlock` (file rules, seccomp and limits on the host's own tree, for containers that forbid namespaces),
`none` (limits only; asks for `--unsafe-no-sandbox`). Inside: no capability, an empty environment, own pid,
network, ipc and uts namespaces, a read-only system, private /tmp and /dev/shm, uid 65534.

Not for: starting or ending the process (`launch.py`), or limits by control group (`cgroup.py`).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from optimizer.confine import seccomp

UID = 65534
LADDER = ("none", "landlock", "namespaces", "bwrap")
JAIL = Path(__file__).with_name("jail.py")
WEIGHTS, TREE, IO, LAUNCHER, COMPILED = "/weights", "/candidate", "/io", "/launcher.py", "/compiled"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "ssl/openssl.cnf")
OWN_ETC = {
    "passwd": "nobody:x:65534:65534:nobody:/tmp:/usr/sbin/nologin\n",
    "group": "nogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
# Engines that would do the candidate's work for it. A target that is one of these names it in `serve`.
OTHER_ENGINES = (
    "vllm", "sglang", "transformers", "tensorrt_llm", "lmdeploy", "mlc_llm", "llama_cpp", "ctranslate2",
    "exllamav2", "exllamav3", "aphrodite", "gptqmodel", "nanovllm", "minisgl", "onnxruntime_genai", "mlx_lm",
)  # fmt: skip
GIB = 1 << 30


class SandboxError(RuntimeError):
    """The level asked for is unknown or cannot be had here."""


@dataclass(frozen=True, slots=True)
class SandboxLevel:
    """What confines candidates on this machine; stands in every ledger line and report."""

    name: str
    notes: tuple[str, ...] = ()  # what this level does not give, and why a higher one is missing

    @property
    def rank(self) -> int:
        return LADDER.index(self.name)


@dataclass(frozen=True, slots=True)
class Limits:
    memory_bytes: int = 16 * GIB
    pids: int = 512
    nofile: int = 8192
    file_bytes: int = GIB  # largest single file, traces and log included
    shm_bytes: int = 2 * GIB
    tmp_bytes: int = 2 * GIB


@dataclass(frozen=True, slots=True)
class Bind:
    source: Path
    inside: str
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Wrapped:
    """An argv that starts the command confined. `pass_fds` are owned by the caller: close them after start."""

    argv: tuple[str, ...]
    env: dict[str, str]
    pass_fds: tuple[int, ...] = ()
    files: tuple[Path, ...] = field(default=())


@functools.cache
def detect() -> SandboxLevel:
    """The highest level that works here, found by trying; notes say why those above did not."""
    notes: list[str] = []
    for name in reversed(LADDER[1:]):
        why = _try(name)
        if why is None:
            return SandboxLevel(name, tuple(notes + list(_gaps(name))))
        notes.append(f"no {name}: {why}")
    return SandboxLevel("none", tuple(notes + list(_gaps("none"))))


def resolve(name: str) -> SandboxLevel:
    """`auto` is the highest level; a name is that level or SandboxError when it does not work here."""
    if name == "auto":
        return detect()
    if name not in LADDER:
        raise SandboxError(f"unknown sandbox level {name!r}; known: auto, {', '.join(reversed(LADDER))}")
    if name != "none" and name != detect().name and (why := _try(name)) is not None:
        raise SandboxError(f"sandbox level {name} does not work here: {why}")
    return SandboxLevel(name, _gaps(name))


def _gaps(name: str) -> tuple[str, ...]:
    if name == "landlock":
        return ("network, /dev/shm and process list are shared with the host; paths are the host's own",)
    if name == "none":
        return ("no confinement at all",)
    return ()


@functools.cache
def _try(name: str) -> str | None:
    """None when the level works: a short command runs inside it. Else the reason."""
    if name == "bwrap" and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    try:
        wrapped = wrap(["/bin/sh", "-c", "test -r /proc/self/status"], [], SandboxLevel(name), Limits())
    except (OSError, ValueError, SandboxError) as error:
        return str(error)
    try:
        done = subprocess.run(
            wrapped.argv,
            env=wrapped.env,
            pass_fds=wrapped.pass_fds,
            capture_output=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        for fd in wrapped.pass_fds:
            os.close(fd)
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def self_test():
    """Rows (what was tried, held, detail) of the escapes tried on this machine; see `escapes.py`."""
    from optimizer.confine import escapes

    return escapes.self_test()


def inside(level: SandboxLevel, bind: Bind) -> str:
    """The path by which the candidate sees a bind: below `namespaces` there are no mounts, so the host's."""
    return bind.inside if level.rank >= LADDER.index("namespaces") else str(bind.source)


def wrap(
    argv: list[str],
    binds: list[Bind],
    level: SandboxLevel,
    limits: Limits,
    *,
    env: dict[str, str] | None = None,
    cwd: str = "/",
    masks: tuple[str, ...] = (),
    device: str = "cpu",
) -> Wrapped:
    """The argv that runs `argv` (its first item an absolute path) at `level`.

    `binds`: what is visible beside the system, read-only unless writable. `masks`: directories that appear
    empty. `device` "cuda" adds NVIDIA's devices and /sys. Raises SandboxError for an unknown level.
    """
    env = dict(env or {"PATH": "/usr/bin:/bin"})
    if level.name == "bwrap":
        return _bwrap(argv, binds, limits, env, cwd, masks, device)
    if level.name not in LADDER:
        raise SandboxError(f"unknown sandbox level {level.name!r}")
    return _jailed(argv, binds, level, limits, env, cwd, masks, device)


def _bwrap(
    argv: list[str],
    binds: list[Bind],
    limits: Limits,
    env: dict[str, str],
    cwd: str,
    masks: tuple[str, ...],
    device: str,
) -> Wrapped:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("bubblewrap is not installed")
    out = [bwrap, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    out += ["--unshare-cgroup-try", "--uid", str(UID), "--gid", str(UID), "--cap-drop", "ALL"]
    out += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"]
    out += ["--disable-userns"] if "--disable-userns" in _bwrap_help() else []
    for name, value in env.items():
        out += ["--setenv", name, value]
    for link, target in _system_links():
        out += ["--symlink", target, link]
    for bind in _system_binds(device):
        out += ["--ro-bind", str(bind.source), bind.inside]
    out += ["--proc", "/proc", "--dev", "/dev", "--size", str(limits.shm_bytes), "--tmpfs", "/dev/shm"]
    out += ["--size", str(limits.tmp_bytes), "--tmpfs", "/tmp"]
    fds: list[int] = []
    for name, text in OWN_ETC.items():
        fds.append(_memory_file(text.encode()))
        out += ["--ro-bind-data", str(fds[-1]), f"/etc/{name}"]
    for bind in binds:
        out += ["--bind" if bind.writable else "--ro-bind", str(bind.source), bind.inside]
    for node in _nvidia_nodes() if device == "cuda" else ():
        out += ["--dev-bind", node, node]
    for mask in masks:
        out += ["--size", "4096", "--tmpfs", mask, "--remount-ro", mask]
    fds.append(_memory_file(seccomp.program()))
    out += ["--chdir", cwd, "--seccomp", str(fds[-1]), "--", *argv]
    return Wrapped(tuple(_limited(out, limits)), {}, tuple(fds))


def _jailed(
    argv: list[str],
    binds: list[Bind],
    level: SandboxLevel,
    limits: Limits,
    env: dict[str, str],
    cwd: str,
    masks: tuple[str, ...],
    device: str,
) -> Wrapped:
    visible = [*_system_binds(device), *binds]
    own_root = level.name == "namespaces"
    nodes = [Bind(Path(node), node, True) for node in (_nvidia_nodes() if device == "cuda" else ())]
    if not own_root:  # the host's own tree: name what may be read of it
        shared = [Path(path) for path in ("/proc", "/sys", "/etc") if Path(path).exists()]
        visible += [Bind(path, str(path)) for path in shared]
        nodes += [
            Bind(Path(f"/dev/{n}"), f"/dev/{n}", True) for n in ("null", "zero", "full", "urandom", "shm")
        ]
    if own_root:
        visible += [Bind(path, f"/etc/{path.name}") for path in sorted((_scratch() / "etc").iterdir())]
    spec = {
        "level": level.name,
        "uid": UID,
        "root": str(_scratch() / "root") if own_root else "",
        "binds": [(str(b.source), b.inside, b.writable) for b in (*visible, *nodes)],
        "symlinks": _system_links(),
        "tmpfs": [("/dev/shm", limits.shm_bytes), ("/tmp", limits.tmp_bytes)],
        "masks": list(masks) if own_root else [],
        "rlimits": {"RLIMIT_NOFILE": limits.nofile, "RLIMIT_CORE": 0, "RLIMIT_FSIZE": limits.file_bytes},
        "cwd": cwd,
        "seccomp": seccomp.program().hex() if level.name != "none" else "",
        "argv": argv,
        "env": env,
    }
    return Wrapped((sys.executable, "-I", "-B", str(JAIL), json.dumps(spec)), {})


def _limited(argv: list[str], limits: Limits) -> list[str]:
    """Set limits in a shell that then becomes the command: no Python between fork and exec."""
    script = f'ulimit -c 0; ulimit -n {limits.nofile}; ulimit -f {limits.file_bytes // 512}; exec "$@"'
    return ["/bin/sh", "-c", script, "sh", *argv]


@functools.cache
def _scratch() -> Path:
    """This process's folder with OWN_ETC as files and a mount point (bubblewrap needs neither)."""
    folder = Path(tempfile.mkdtemp(prefix=f"hotloop-{os.getpid()}-jail-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "etc").mkdir()
    (folder / "root").mkdir()
    for name, text in OWN_ETC.items():
        (folder / "etc" / name).write_text(text)
    return folder


@functools.cache
def _bwrap_help() -> str:
    return subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False, timeout=10).stdout


def _system_binds(device: str) -> list[Bind]:
    paths = [Path(path) for path in SYSTEM if Path(path).exists() and not Path(path).is_symlink()]
    paths += [path for name in ETC if (path := Path("/etc") / name).exists()]
    paths += [Path("/sys/devices/system/cpu")] if Path("/sys/devices/system/cpu").exists() else []
    if device == "cuda":  # NCCL reads the PCI topology
        paths = [path for path in paths if path != Path("/sys/devices/system/cpu")]
        paths += [path for name in ("/sys", "/opt/cuda", "/etc/vulkan") if (path := Path(name)).exists()]
    return [Bind(path.resolve() if path.is_file() else path, str(path)) for path in paths]


def _system_links() -> list[tuple[str, str]]:
    return [(path, str(Path(path).readlink())) for path in SYSTEM if Path(path).is_symlink()]


def _nvidia_nodes() -> list[str]:
    found = sorted(str(p) for p in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia[\w-]*", p.name))
    return found


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("hotloop")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


@functools.cache
def python_binds(python: Path) -> tuple[Bind, ...]:
    """What an interpreter needs to be seen by the candidate: its own tree, its base's, its packages'."""
    code = (
        "import json,sys,sysconfig,os;p=sysconfig.get_paths();"
        "print(json.dumps([sys.prefix,sys.base_prefix,p['purelib'],p['platlib'],p['stdlib'],"
        "os.path.dirname(os.path.realpath(sys.executable))]))"
    )
    done = subprocess.run(
        [str(python), "-I", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin"},
    )
    wanted: list[Path] = []
    for text in json.loads(done.stdout):
        for path in (Path(text), Path(text).resolve()):
            covered = any(path.is_relative_to(have) for have in (*wanted, Path("/usr"), Path("/bin")))
            if path.exists() and not covered:
                wanted.append(path)
    return tuple(Bind(path, str(path)) for path in wanted)


@functools.cache
def package_masks(python: Path, allowed: frozenset[str]) -> tuple[str, ...]:
    """Directories of other engines in the interpreter's packages, less those `allowed`."""
    code = "import json,sysconfig;p=sysconfig.get_paths();print(json.dumps([p['purelib'],p['platlib']]))"
    done = subprocess.run(
        [str(python), "-I", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin"},
    )
    folders = [Path(text) / name for text in set(json.loads(done.stdout)) for name in OTHER_ENGINES]
    return tuple(str(path) for path in folders if path.is_dir() and path.name not in allowed)
