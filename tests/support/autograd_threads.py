"""autograd_threads.py: waits for autograd's threads, for programs that end soon after a backward on a device.

Autograd runs the backward of a device on a thread of its own. `backward()` returns when the gradients are there. Only
afterwards that thread drops its shares in them and in the context variables of the caller, and asks for the GIL. If the
interpreter goes down while it waits for the GIL, Python up to 3.13 ends the thread in the middle of PyTorch's
destructors, which aborts the process: "terminate called without an active exception". That happens without any hooks,
too, rarely, and mostly where processors are overloaded.
"""

import contextvars
import time
import weakref

import torch

_DEADLINE_S = 60.0


class _Mark:
    pass


def await_autograd(*devices: str) -> None:
    """Return when the threads of these devices hold nothing of Python's. Call it at the end of a program.

    A thread drops all of one backward before it begins the next one. So it is a last backward that is waited for, by a
    mark among the context variables, which are the last to be dropped.
    """
    for device in devices:
        mark, held = _Mark(), contextvars.ContextVar[_Mark]("held")
        alive = weakref.ref(mark)
        token = held.set(mark)
        torch.ones(1, device=device, requires_grad=True).sum().backward()
        held.reset(token)
        del mark, token
        if not hasattr(torch._C, "_remove_obj_from_tls"):  # older versions keep them until the thread's next backward
            torch._C._stash_obj_in_tls("context", None)
        deadline = time.monotonic() + _DEADLINE_S
        while alive() is not None:
            assert time.monotonic() < deadline, f"autograd's thread of {device} has not let go"
            time.sleep(0.001)
