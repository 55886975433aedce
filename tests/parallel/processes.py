"""processes.py: the processes of one process group, kept for as many cases as a file of tests asks for.

A *case* is a function of a `World` in one of the program files beside this one. Each process runs it; what it raises
comes back as text, and a process that hangs is killed with its stacks told.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).parent
START_S = 60.0  # what a process may need on a busy machine before it is at work
GRACE_S = 5.0  # how long the others may take to fail, too, once one process has


class CaseError(Exception):
    """A case failed in at least one process; the text has what each of them said."""


class Processes:
    """The processes of one group, started at the first case and again after a failed one.

    Parameters
    ----------
    backend : str
        "gloo", on CPU tensors and the disk tier, or "nccl", on as many GPUs of this host.
    size : int
        How many processes.
    directory : pathlib.Path
        For spill files, rendezvous files and what a process prints.
    """

    def __init__(self, backend: str, size: int, directory: Path) -> None:
        self.backend = backend
        self.size = size
        self.directory = directory
        self._started: list[_Process] = []

    def run(self, case: str, *, timeout_s: float = 60, **arguments: Any) -> list[Any]:
        """Run ``case``, a "file:function", in each process, and return what each of them returned.

        Raises
        ------
        CaseError
            With the traceback of each process that failed, or its stacks where it did not end in time.
        """
        if not self._started:
            self._start()
            timeout_s += START_S
        for process in self._started:
            process.ask({"case": case, "arguments": arguments})
        deadline = time.monotonic() + timeout_s
        replies: list[Any] = [None] * self.size
        while any(reply is None for reply in replies) and time.monotonic() < deadline:
            for rank, process in enumerate(self._started):
                if replies[rank] is None and (reply := process.reply()) is not None:
                    replies[rank] = reply
                    if "error" in reply:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
            time.sleep(0.002)
        if all(reply is not None and "error" not in reply for reply in replies):
            return [reply["result"] for reply in replies]
        told = [
            f"--- rank {rank}\n{reply['error'] if reply else process.stop()}"
            for rank, (process, reply) in enumerate(zip(self._started, replies, strict=True))
            if reply is None or "error" in reply
        ]
        self.close()
        raise CaseError(f"{case} {arguments}\n" + "\n".join(told)) from None

    def _start(self) -> None:
        rendezvous = Path(tempfile.mkdtemp(dir=self.directory)) / "rendezvous"
        for rank in range(self.size):
            self._started.append(_Process(self.backend, rank, self.size, rendezvous))

    def close(self) -> None:
        """End the processes."""
        for process in self._started:
            process.stop()
        self._started = []


class _Process:
    def __init__(self, backend: str, rank: int, size: int, rendezvous: Path) -> None:
        self._output_path = rendezvous.with_name(f"output-{rank}")
        self._replies_path = rendezvous.with_name(f"replies-{rank}")
        self._replies_path.touch()
        environment = dict(
            os.environ,
            PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",  # so that little more is reserved than allocated
            CUBLAS_WORKSPACE_CONFIG=":4096:8",  # fixed algorithms on every stream
            LOCAL_WORLD_SIZE=str(size),
            OMP_NUM_THREADS="1",
        )
        command = [sys.executable, str(HERE / "worker.py"), backend, str(rank), str(size), str(rendezvous)]
        with self._output_path.open("w") as output:
            self._popen = subprocess.Popen(
                [*command, str(self._replies_path)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
        self._replies: TextIO = self._replies_path.open()

    def ask(self, message: dict[str, Any]) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(message) + "\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            return  # it has died: reply() says so

    def reply(self) -> Any:
        """What it replied, or None so far."""
        has_ended = self._popen.poll() is not None
        place = self._replies.tell()
        line = self._replies.readline()
        if line.endswith("\n"):
            return json.loads(line)
        self._replies.seek(place)
        if has_ended:
            return {"error": f"the process ended with {self._popen.returncode}\n{self._tail()}"}
        return None

    def stop(self) -> str:
        """End it; the stacks that it was in, for a process that does not answer."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGABRT)  # faulthandler writes the stacks of all threads
        self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        self._replies.close()
        return self._tail()

    def _tail(self) -> str:
        return self._output_path.read_text(errors="replace")[-6000:]
