"""The system calls a candidate may not make, as a classic BPF program.

Not for: installing it (`bwrap --seccomp FD` or `jail.py` do). Everything not listed is allowed: this is the
second layer behind namespaces, not the first.
"""

from __future__ import annotations

import errno
import platform
import struct

# name -> (x86_64, aarch64); -1 where the architecture lacks the call
DENIED: dict[str, tuple[int, int]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "open_by_handle_at": (304, 265),
    "userfaultfd": (323, 282),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "iopl": (172, -1),
    "ioperm": (173, -1),
}

_ARCH = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_CLONE = (56, 220)
_CLONE3 = 435
# new cgroup, uts, ipc, user, pid, net and mount namespaces
_CLONE_NEW = 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000

_LD_W_ABS, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000


def _errno(code: int) -> int:
    return 0x00050000 | code


def _ins(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    return struct.pack("<HBBI", code, jt, jf, k)


def program(machine: str | None = None) -> bytes:
    """The filter as an array of `struct sock_filter`. ValueError names an architecture without a table."""
    machine = machine or platform.machine()
    if machine not in _ARCH:
        raise ValueError(f"no seccomp table for {machine}; known: {sorted(_ARCH)}")
    arch, column = _ARCH[machine]
    out = [
        _ins(_LD_W_ABS, 4),
        _ins(_JEQ, arch, jt=1, jf=0),
        _ins(_RET, _KILL),
        _ins(_LD_W_ABS, 0),
    ]
    if machine == "x86_64":  # the x32 ABI would bypass the numbers below
        out += [_ins(_JGE, 0x40000000, jt=0, jf=1), _ins(_RET, _errno(errno.ENOSYS))]
    for numbers in DENIED.values():
        if numbers[column] >= 0:
            out += [_ins(_JEQ, numbers[column], jt=0, jf=1), _ins(_RET, _errno(errno.EPERM))]
    # clone3 keeps its flags behind a pointer: without it, libc falls back to clone
    out += [_ins(_JEQ, _CLONE3, jt=0, jf=1), _ins(_RET, _errno(errno.ENOSYS))]
    # For a clone: refuse new namespaces. The flags are the first argument, at offset 16, low word first.
    out += [
        _ins(_JEQ, _CLONE[column], jt=0, jf=3),
        _ins(_LD_W_ABS, 16),
        _ins(_JSET, _CLONE_NEW, jt=0, jf=1),
        _ins(_RET, _errno(errno.EPERM)),
        _ins(_RET, _ALLOW),
    ]
    return b"".join(out)
