"""Kernels that start warm: one process imports what every notebook needs, and each kernel is a fork of it.

A kernel is still a process of its own with a state of its own; it only does not import torch again. `python -m
jemlib.kernels` is that first process. It ends with its parent, and its kernels with it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import uuid
from typing import Any

from jupyter_client import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

#: a fork of a process that has loaded Apple's frameworks may crash, and Windows has none
CAN_FORK = sys.platform == "linux" and hasattr(os, "pidfd_open")

#: torch imports its compiler at the first step of an optimizer
PRELOADED = ("ipykernel.kernelapp", "jemlib.stability", "torch._dynamo", "matplotlib.pyplot")


class ForkedKernelManager(AsyncKernelManager):
    """Starts its kernel as a fork; for `nbclient` and papermill as kernel_manager_class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.provisioner = _Provisioner(parent=self, kernel_id=str(uuid.uuid4()), kernel_spec=self.kernel_spec)


class _Provisioner(LocalProvisioner):
    async def launch_kernel(self, cmd: list[str], **options: Any) -> dict[str, Any]:
        arguments = cmd[cmd.index("ipykernel_launcher") + 1 :]
        self.process = _Process(_fork({"arguments": arguments, "cwd": str(options.get("cwd") or ".")}))
        self.pid = self.pgid = self.process.pid  # it leads a process group of its own
        return self.connection_info


class _Process:
    """As much of `subprocess.Popen` as a provisioner uses. Not our child, so how it ended is not known."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int):
        self.pid = pid
        try:
            self.handle = os.pidfd_open(pid)  # a number may be given to another process, a handle never
        except ProcessLookupError:
            raise RuntimeError("the kernel ended as it started") from None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.handle)

    def poll(self) -> int | None:
        return 1 if self._ended(0) else None

    def wait(self) -> int:
        self._ended(None)
        return 1

    def _ended(self, milliseconds: int | None) -> bool:
        poller = select.poll()
        poller.register(self.handle, select.POLLIN)
        return bool(poller.poll(milliseconds))

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_ONE_AT_A_TIME = threading.Lock()  # a worker may have several threads


@functools.cache
def _first_process() -> subprocess.Popen:
    command = [sys.executable, "-m", "jemlib.kernels"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _fork(order: dict[str, Any]) -> int:
    """The process id of a new kernel; RuntimeError where there is none."""
    with _ONE_AT_A_TIME:
        first = _first_process()
        try:
            first.stdin.write(json.dumps(order) + "\n")
            first.stdin.flush()
            return int(first.stdout.readline())
        except (OSError, ValueError):  # ValueError: no number came back
            _first_process.cache_clear()  # the next attempt starts another
            raise RuntimeError("the process that kernels are forked from has ended") from None


def _serve() -> None:
    """Fork a kernel for every line of stdin and print its process id."""
    # Ctrl-C in a terminal reaches this process too; it ends when its parent closes the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that an ended kernel is gone at once
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            _become_kernel(**json.loads(line))
        try:
            os.write(answers, f"{pid}\n".encode())
        except BrokenPipeError:  # the parent is gone, and the new kernel ends with this process
            return


def _become_kernel(arguments: list[str], cwd: str) -> None:
    from ipykernel.kernelapp import launch_new_instance

    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which the workers of a sweep hold back
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(cwd)
    try:
        launch_new_instance(argv=[*arguments, f"--IPKernelApp.parent_handle={os.getppid()}"])
    finally:
        os._exit(0)


if __name__ == "__main__":
    _serve()
