"""Confine this process, then run the candidate: the sandbox where bubblewrap is missing or not allowed.

Run as `python -I -B jail.py SPEC` with a JSON object (see `sandbox.py`): `level` is "namespaces" (own user,
pid, mount, net, ipc and uts namespaces, an own root) or "landlock" (file rules on the host's own tree)
or "none" (limits and clean-up only). The first two also drop every capability, forbid new privileges and
install the seccomp program.

Standard library and ctypes only; imports nothing of ours. Not for: choosing a level (`sandbox.py`).
"""

import contextlib
import ctypes
import fcntl
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)  # fmt: skip
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = (
    1,
    24,
    22,
    36,
    38,
)
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def check(result, what):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source, target, kind, flags, data=""):
    encode = lambda text: text.encode() if text else None  # noqa: E731
    check(LIBC.mount(encode(source), encode(target), encode(kind), flags, encode(data)), f"mount {target}")


def bind(source, target, writable):
    """Bind a file or directory with everything mounted below it; read-only ones recursively so."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "a").close()
    mount(source, target, "", MS_BIND | MS_REC)
    if not writable:
        attributes = struct.pack("<QQQQ", MS_RDONLY | MS_NOSUID, 0, 0, 0)
        check(
            LIBC.syscall(SYS_MOUNT_SETATTR, -100, target.encode(), 0x8000, attributes, len(attributes)),
            f"mount_setattr {target}",
        )


def build_root(spec):
    root = spec["root"]
    mount("", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    os.makedirs(root + "/dev/shm")
    for name in DEVICES:
        bind("/dev/" + name, root + "/dev/" + name, True)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink("/proc/self/fd" + target, root + "/dev/" + name)
    for path, size in spec["tmpfs"]:
        os.makedirs(root + path, exist_ok=True)
        mount("tmpfs", root + path, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={size}")
    for link, target in spec["symlinks"]:
        os.symlink(target, root + link)
    for source, inside, writable in spec["binds"]:
        bind(source, root + inside, writable)
    for path in spec["masks"]:
        mount("tmpfs", root + path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "mode=755,size=4096")
    os.makedirs(root + "/proc")
    mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV)
    old = root + "/.old"
    os.mkdir(old)
    check(LIBC.syscall(SYS_PIVOT_ROOT[platform.machine()], root.encode(), old.encode()), "pivot_root")
    os.chdir("/")
    check(LIBC.umount2(b"/.old", 2), "umount old root")
    os.rmdir("/.old")


def loopback_up():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14s", b"lo", 0x1 | 0x40, b"")
        fcntl.ioctl(sock, 0x8914, request)  # SIOCSIFFLAGS: IFF_UP | IFF_RUNNING


def own_namespaces(spec):
    """New namespaces; returns in the child that is process 1 of the new pid namespace."""
    uid, gid = os.geteuid(), os.getegid()
    check(
        LIBC.unshare(NEW_USER | NEW_PID | NEW_NS | NEW_NET | NEW_IPC | NEW_UTS),
        "unshare",
    )
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{spec['uid']} {uid} 1"),
        ("gid_map", f"{spec['uid']} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as handle:
            handle.write(text)
    supervise(namespace=True)
    build_root(spec)
    loopback_up()
    socket.sethostname("sandbox")


def supervise(namespace=False):
    """Fork: the parent waits, passes the exit code on, and leaves nobody behind. Returns in the child."""
    child = os.fork()
    if child == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return
    if not namespace:
        signal.signal(signal.SIGTERM, leave)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    status = 0
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            break
        if pid == child:
            break
    code = os.waitstatus_to_exitcode(status)
    if not namespace:
        kill_descendants()
    os._exit(code if code >= 0 else 128 - code)


def leave(*_):
    kill_descendants()
    os._exit(143)


def kill_descendants():
    """Everyone below this process (a child subreaper) is killed, until nobody is left."""
    for _ in range(100):
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as handle:
                children = [int(pid) for pid in handle.read().split()]
        except OSError:
            return
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for _ in children:
            with contextlib.suppress(ChildProcessError):
                os.wait()


def landlock_abi():
    return LIBC.syscall(SYS_LANDLOCK_CREATE, None, 0, 1)


def landlock(spec):
    """Files: read below `binds`, write below the writable ones. Signals and abstract sockets: own kin only."""
    abi = check(landlock_abi(), "landlock")
    files = (1 << (13 + (abi >= 2) + (abi >= 3))) - 1
    if abi >= 5:
        files |= 1 << 15  # device ioctl
    scoped = 3 if abi >= 6 else 0
    ruleset = struct.pack("<QQQ", files, 0, scoped)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    fd = check(LIBC.syscall(SYS_LANDLOCK_CREATE, ruleset, len(ruleset), 0), "landlock_create_ruleset")
    read = 1 | 4 | 8  # execute, read file, read directory
    file_only = 1 | 2 | 4 | (1 << 14 if abi >= 3 else 0) | (1 << 15 if abi >= 5 else 0)
    for source, _, writable in spec["binds"]:
        allowed = files if writable else read
        if not os.path.isdir(source):
            allowed &= file_only
        beneath = os.open(source, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("<Qi", allowed, beneath)
        check(LIBC.syscall(SYS_LANDLOCK_ADD, fd, 1, rule, 0), f"landlock_add_rule {source}")
        os.close(beneath)
    no_new_privileges()
    check(LIBC.syscall(SYS_LANDLOCK_RESTRICT, fd, 0), "landlock_restrict_self")
    os.close(fd)


def no_new_privileges():
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def drop_capabilities():
    for capability in range(64):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("<Ii", 0x20080522, 0)
    check(LIBC.capset(header, struct.pack("<6I", *[0] * 6)), "capset")


def install_seccomp(program):
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    check(LIBC.prctl(PR_SET_SECCOMP, 2, fprog, 0, 0), "seccomp")


def main():
    spec = json.loads(sys.argv[1])
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if spec["level"] == "namespaces":
        own_namespaces(spec)
        supervise(namespace=True)  # process 1 reaps; its end ends everyone in the pid namespace
    else:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        supervise()
        if spec["level"] == "landlock":
            landlock(spec)
    for name, value in spec["rlimits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        resource.setrlimit(number, (value, value) if hard < 0 else (min(value, hard), min(value, hard)))
    os.chdir(spec["cwd"])
    if spec["level"] != "none":
        no_new_privileges()
        drop_capabilities()
        install_seccomp(bytes.fromhex(spec["seccomp"]))
    os.execve(spec["argv"][0], spec["argv"], spec["env"])


if __name__ == "__main__":
    main()
