"""The parent's end of one offloader's process (``child.py``)."""

from __future__ import annotations

import multiprocessing
from typing import Any

from child import serve
from offloaders import Options
from workloads import Workload


class WorkerFailed(Exception):
    """What a process was told to do did not work out; the text is the row's. The process is of no further use."""


class Worker:
    """A process that trains one model under one offloader, and does one thing at a time as it is told.

    It starts to import while others are being measured; its model is built with the first call.
    """

    def __init__(self, name: str, workload: Workload, options: Options, patience_s: float) -> None:
        context = multiprocessing.get_context("spawn")  # a forked child could not use CUDA
        self._connection, childs_end = context.Pipe()
        self._patience_s = patience_s
        self._process = context.Process(target=serve, args=(childs_end, name, workload, options), daemon=True)
        self._process.start()
        childs_end.close()  # so that the connection ends with the process

    def call(self, method: str, /, **arguments: object) -> Any:
        """Have a method of the child's ``Session`` run, and wait for what it returns."""
        try:
            self._connection.send((method, arguments))
            if not self._connection.poll(self._patience_s):
                self.kill()
                raise WorkerFailed(f"failed: no answer to {method} within {self._patience_s:.0f} s")
            kind, value = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join()
            raise WorkerFailed(f"failed: the process ended with status {self._process.exitcode}") from error
        if kind != "done":
            raise WorkerFailed(f"{kind}: {value}")
        return value

    def stop(self) -> None:
        """Hang up, and wait for the process's end: its memory is free after it."""
        self._connection.close()
        self._process.join(timeout=30)
        self.kill()

    def kill(self) -> None:
        """End the process whatever it does."""
        self._process.kill()
        self._process.join()
