"""Programs that attack their sandbox; each passes exactly when its attack worked, or when it can fool the verdict.

The test puts in: VICTIM (a process of this machine), PORT (of a server here), SECRET and CANARY (files here), PREFIX
(the interpreter's folder).
"""

from __future__ import annotations

PROGRAMS = {
    "fork bomb": """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    "fork bomb that gives up": """
import os, time
for _ in range(500):
    if os.fork() == 0:
        time.sleep(30)
""",
    "threads": """
import threading, time
for _ in range(500):
    threading.Thread(target=time.sleep, args=(30,)).start()
""",
    "memory": """
kept = []
while len(kept) < 2000:
    kept.append(bytearray(b"x") * 2**20)
""",
    "memory in many processes": """
import os, time
for _ in range(16):
    if os.fork() == 0:
        kept = bytearray(b"x") * (64 * 2**20)
        time.sleep(1)
        os._exit(0)
statuses = [os.wait()[1] for _ in range(16)]
assert not any(statuses), statuses
""",
    "shared memory": """
import mmap
kept = [mmap.mmap(-1, 2**20) for _ in range(1000)]
for each in kept:
    each.write(b"x" * 2**20)
""",
    "one large file": """
with open("/tmp/x", "wb") as file:
    for _ in range(1000):
        file.write(b"x" * 2**20)
""",
    "a full disk": """
for number in range(1000):
    with open(f"/tmp/{number}", "wb") as file:
        file.write(b"x" * 2**20)
""",
    "a million files": """
for number in range(1_000_000):
    open(f"/tmp/{number}", "w").close()
""",
    "open files": """
kept = [open("/dev/zero") for _ in range(5000)]
""",
    "network, this machine": """
import socket
socket.create_connection(("127.0.0.1", PORT), timeout=1)
""",
    "network, elsewhere": """
import socket
socket.create_connection(("192.0.2.1", 80), timeout=1)
""",
    "network, raw": """
import socket
socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)
""",
    "proc, other processes": """
import os
found = [open(f"/proc/{pid}/environ", "rb").read() for pid in (1, os.getppid(), VICTIM)]
assert any(found)
""",
    "proc, switches": """
open("/proc/sysrq-trigger", "w").write("h")
""",
    "sys, own limits": """
import glob
for path in glob.glob("/sys/fs/cgroup/**/*max*", recursive=True) or ["/sys/fs/cgroup/memory.max"]:
    open(path, "w").write("max")
""",
    "symlink to a file of this machine": """
import os
os.symlink(SECRET, "/tmp/link")
assert open("/tmp/link").read()
""",
    "symlink to write through": """
import os
os.symlink(CANARY, "/tmp/link")
open("/tmp/link", "w").write("changed")
assert not os.path.islink("/tmp/link")
""",
    "hard link to the interpreter": """
import os, sys
os.link(os.path.realpath(sys.executable), "/tmp/python")
os.chmod("/tmp/python", 0o6755)
""",
    "writing over the library": """
import json
open(json.__file__, "a").write("# changed")
""",
    "password file": """
assert "root" in open("/etc/shadow").read()
""",
    "removing everything": """
import os
for root in ("/usr", PREFIX, "/etc", "/dev"):
    for folder, _, files in os.walk(root):
        for name in files[:3]:
            os.remove(os.path.join(folder, name))
        break
""",
    "signal to a process of this machine": """
import os
os.kill(VICTIM, 9)
""",
    "signal to all": """
import os
os.kill(-1, 9)
os.kill(1, 9)
os.kill(os.getppid(), 9)
raise SystemExit(1)
""",
    "ignoring signals": """
import signal, time
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    time.sleep(1)
""",
    "a daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(300)
    os._exit(0)
raise SystemExit(3)
""",
    "output flood": """
while True:
    print("x" * 10_000)
""",
    "error flood": """
import sys
while True:
    sys.stderr.write("x" * 10_000)
""",
    "endless loop": """
while True:
    pass
""",
    "leaving early": """
import os
os._exit(0)
""",
    "leaving politely": """
import sys
sys.exit(0)
""",
    "crash": """
import ctypes
ctypes.string_at(0)
""",
    "deep recursion in C": """
import sys
sys.setrecursionlimit(10**9)
def again(x):
    return again([x])
again([])
""",
    "becoming root": """
import os
os.setuid(0)
assert os.getuid() == 0
open("/usr/became-root", "w")
""",
    "leaving the root": """
import os
os.mkdir("/tmp/inner")
os.chroot("/tmp/inner")
""",
    "mounting": """
import ctypes
library = ctypes.CDLL(None, use_errno=True)
assert library.mount(b"none", b"/tmp", b"tmpfs", 0, b"size=1g") == 0
""",
    "a namespace of its own": """
import ctypes, os
library = ctypes.CDLL(None, use_errno=True)
assert library.unshare(0x10000000 | 0x00020000) == 0  # user and mount
open("/proc/self/uid_map", "w").write("0 65534 1") if os.path.exists("/proc/self/uid_map") else None
os.mkdir("/tmp/large")
library.mount(b"none", b"/tmp/large", b"tmpfs", 0, b"size=4g")
for number in range(200):
    with open(f"/tmp/large/{number}", "wb") as file:
        file.write(b"x" * (4 * 2**20))
""",
    "tracing the parent": """
import ctypes, os
library = ctypes.CDLL(None, use_errno=True)
assert library.ptrace(16, os.getppid(), 0, 0) == 0
""",
    "higher priority": """
import os
os.nice(-10)
""",
    "the container engine": """
import socket
socket.socket(socket.AF_UNIX).connect("/var/run/docker.sock")
""",
    "the environment": """
import os
assert os.environ["FLIPTRACE_TEST_SECRET"]
""",
    "the disks": """
import glob, os
for path in glob.glob("/dev/[sv]d*") + glob.glob("/dev/nvme*") + ["/dev/mem", "/dev/kmsg"]:
    os.open(path, os.O_RDONLY)
""",
}
