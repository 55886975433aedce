"""interpreter.py: runs a program, stock or offloaded, and notes what must be the same in both."""

import contextlib
import gc
import re
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor

import torchoffload
from gradients import Run, describe, eager_collector
from programs import custom, operators
from programs.notes import Kept, Notes, copy_gradients, plain_tensors
from programs.program import Program, Step

JOIN_TIMEOUT_S = 60
ALIVE_TIMEOUT_S = 5.0


class _Holder(TorchFunctionMode):
    """Holds every tensor that a call from Python returns."""

    def __init__(self, held: list[Any]) -> None:
        super().__init__()
        self.held = held

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor | tuple | list):
            self.held.append(result)
        return result


class Missing(Exception):
    """A step's value is not there: the step is left out."""


class Interpreter:
    """One run of a program. `kept` and `streams` are the run's, values and notes the thread's."""

    def __init__(
        self,
        program: Program,
        run: Run,
        parent: "Interpreter | None" = None,
        watches_storages: bool = False,
        may_live: Collection[str] = (),
    ) -> None:
        self.program, self.run = program, run
        self.watches_storages, self.may_live = watches_storages, set(may_live)
        self.notes = Notes(run.device)
        self.values: dict[str, Any] = {}
        self.kept = Kept(self.notes)
        self.leaves: dict[str, torch.Tensor] = {}
        self.path: list[str] = []
        if parent is None:
            self.contexts = [self._context(options) for options in program.contexts]
            self.streams: dict[int, Any] = {}
            self.storages: list[tuple[str, Any]] = []
            self.held: list[Any] | None = None
            self.copies_gradients = False
        else:
            self.contexts, self.streams, self.storages = parent.contexts, parent.streams, parent.storages
            self.held, self.copies_gradients = parent.held, parent.copies_gradients

    def _context(self, options: dict[str, Any]) -> Any:
        return self.run.offload(**(options | {"learn": self.program.learns}))

    # ---- the whole ----

    def run_all(self) -> Notes:
        self.steps(self.program.steps)
        for name in sorted(self.values):
            self.notes.note(f"value {name}", self.values[name])
        self.note_gradients("end")
        self.do_clear_gradients({})
        self.values.clear()
        self.leaves.clear()
        self.kept.clear()  # its tensors lead to nodes that hold the list: a cycle that no collector sees
        self.contexts.clear()
        self.notes.alive = self.alive()
        return self.notes

    @contextlib.contextmanager
    def knowing_origins(self) -> Iterator[None]:
        """No tensor of the program's dies before the end of the block, no backward makes a graph, nothing is read."""
        self.held = []
        with _Holder(self.held):
            yield
        self.held.clear()

    def alive(self) -> list[str]:
        """Values whose storages outlive the program, once all that may hold them for a while has ended."""
        # A backward that failed leaves its tasks, and with them its graph, in the engine's queue until the next one.
        torch.ones((), device=self.run.device, requires_grad=True).clone().backward()
        deadline = time.monotonic() + ALIVE_TIMEOUT_S
        while True:
            gc.collect()
            alive = [name for name, storage in self.storages if not storage.expired()]
            if self.run.stock or set(alive) <= self.may_live or time.monotonic() > deadline:
                return alive
            self.look_at_ended_io()
            time.sleep(0.001)

    def look_at_ended_io(self) -> None:
        """What I/O under way touched when it was dropped is let go at a later hook event: here is one."""
        with self.run.offload():
            y = torch.ones(4, device=self.run.device, requires_grad=True).sin()
        y.sum().backward()

    def steps(self, steps: list[Step], *, guarded: bool = True) -> None:
        for index, step in enumerate(steps):
            self.path.append(str(index))
            try:
                self.step(step, guarded=guarded)
            finally:
                self.path.pop()

    def step(self, step: Step, *, guarded: bool) -> None:
        name = step["do"] + (f" {step['op']}" if "op" in step else "")
        try:
            getattr(self, f"do_{step['do']}")(step)
        except Missing:
            return
        except (Exception, custom.Interrupt) as error:
            # Texts only: the traceback would keep the program's frames, and with them its graphs.
            self.notes.raised[type(error).__name__] += 1
            if not guarded:
                raise
            self.note(step, re.sub(r"0x[0-9a-f]+", "0x...", describe(error)))
        else:
            self.notes.done[name] += 1

    def note(self, step: Step, value: Any) -> None:
        self.notes.note(f"step {'.'.join(self.path)} {step['do']} {step.get('op', '')}".strip(), value)

    def note_gradients(self, when: str) -> None:
        self.notes.note(f"gradients {when}", [leaf.grad for _, leaf in sorted(self.leaves.items())])

    def value(self, name: str) -> torch.Tensor:
        if name not in self.values:
            raise Missing
        return self.values[name]

    def put(self, step: Step, tensor: torch.Tensor) -> None:
        name = step["out"]
        self.values[name] = tensor
        if self.watches_storages:
            self.storages += [(name, StorageWeakRef(t.untyped_storage())) for t in plain_tensors(tensor)]

    # ---- values ----

    def do_leaf(self, step: Step) -> None:
        dtype, shape = getattr(torch, step["dtype"]), step["shape"]
        self.run.reseed(zlib.crc32(step["out"].encode()))  # so that a leaf left out changes no other
        make = {"parameter": self.run.parameter, "two": self.two}.get(step["kind"])
        leaf = make(*shape) if make else self.run.tensor(*shape, dtype=dtype)
        if step["kind"] != "constant":
            leaf.requires_grad_()
            self.leaves[step["out"]] = leaf
        self.put(step, leaf)

    def two(self, *shape: int) -> torch.Tensor:
        return TwoTensor(self.run.tensor(*shape), self.run.tensor(*shape))

    def do_unary(self, step: Step) -> None:
        self.put(step, operators.UNARY[step["op"]](self.value(step["x"])))

    def do_binary(self, step: Step) -> None:
        self.put(step, operators.BINARY[step["op"]](self.value(step["x"]), self.value(step["y"])))

    def do_view(self, step: Step) -> None:
        self.put(step, operators.VIEWS[step["op"]](self.value(step["x"])))

    def do_in_place(self, step: Step) -> None:
        operators.in_place(step["op"], self.value(step["x"]))

    def do_custom(self, step: Step) -> None:
        tensor = self.value(step["x"])
        if step["op"] in custom.NOT_OF_WRAPPERS and isinstance(tensor, TwoTensor):
            raise Missing
        if step["op"] in custom.WRITES and operators.is_undefined_in_place(tensor):
            raise Missing
        self.put(step, custom.call(step["op"], tensor, self.kept))

    def do_checkpoint(self, step: Step) -> None:
        def chain(tensor: torch.Tensor) -> torch.Tensor:
            with self.context(step["context"]) if "context" in step else contextlib.nullcontext():
                return operators.apply_chain(step["chain"], tensor)

        self.put(step, operators.checkpointed(step["op"], chain, self.value(step["x"])))

    def do_drop(self, step: Step) -> None:
        self.value(step["x"])
        del self.values[step["x"]]

    def do_cycle(self, step: Step) -> None:
        custom.Garbage(self.value(step["x"]))
        del self.values[step["x"]]

    def do_collect(self, step: Step) -> None:
        gc.collect()

    def do_mark(self, step: Step) -> None:
        tensor = self.value(step["x"])
        if not self.run.stock and type(tensor) is torch.Tensor:
            torchoffload.never_offload(tensor)

    def do_trim(self, step: Step) -> None:
        if not self.run.stock:
            torchoffload.trim()

    def do_hook(self, step: Step) -> None:
        tensor = self.value(step["x"])
        if tensor.is_inference() or tensor._version > 0:
            raise Missing  # PyTorch 2.13 itself may crash on a hook for a view that was written to
        tensor.register_hook(custom.HOOKS[step["op"]])

    def do_raise(self, step: Step) -> None:
        raise custom.Interrupt("planted") if step["op"] == "Interrupt" else ValueError("planted")

    # ---- backward ----

    def total(self, names: list[str]) -> torch.Tensor:
        present = [self.values[name] for name in names if name in self.values]
        if not present:
            raise Missing
        return sum(operators.real(tensor).square().sum() if i % 2 else operators.real(tensor).sum()
                   for i, tensor in enumerate(present))  # fmt: skip

    def creates_graph(self, step: Step) -> bool:
        return self.held is None and step.get("create", False)

    def do_backward(self, step: Step) -> None:
        inputs = [self.values[name] for name in step.get("inputs", []) if name in self.values] or None
        try:
            self.total(step["of"]).backward(
                retain_graph=step["retain"], create_graph=self.creates_graph(step), inputs=inputs
            )
            self.notes.finished_count += any(leaf.grad is not None for leaf in self.leaves.values())
        finally:
            self.note_gradients(".".join(self.path))
            self.notes.count_shared_gradients(self.leaves.values(), self.values.values())
            if self.copies_gradients:
                copy_gradients(self.leaves.values())

    def do_grad(self, step: Step) -> None:
        sources = [self.values[name] for name in step["source"] if name in self.values]
        if not sources:
            raise Missing
        gradients = torch.autograd.grad(
            self.total(step["of"]), sources, retain_graph=step["retain"], create_graph=self.creates_graph(step),
            allow_unused=True,
        )  # fmt: skip
        self.note(step, gradients)
        found = [gradient for gradient in gradients if gradient is not None]
        self.notes.finished_count += bool(found)
        if found:
            self.put(step, found[0] * 0.1)

    def do_clear_gradients(self, step: Step) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None

    def do_read(self, step: Step) -> None:
        if self.held is not None:
            raise Missing
        node = self.value(step["x"]).grad_fn
        for _ in range(step["depth"]):
            if node is not None and node.next_functions:
                node = node.next_functions[0][0]
        if node is None:
            raise Missing
        for name in sorted(dir(node)):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    value = getattr(node, name)
                except RuntimeError as error:
                    # PyTorch itself refuses to unpack an argument of a checkpoint there. If there are any hooks, it
                    # does so earlier, with another text.
                    if torch.is_inference_mode_enabled():
                        raise RuntimeError("not unpacked in inference mode") from error
                    raise
                if isinstance(value, torch.Tensor | tuple):
                    self.note(step, [name, value])

    # ---- blocks ----

    def context(self, index: int) -> Any:
        if index < 0:
            return self.run.noop()
        return self.contexts[index % len(self.contexts)] if self.contexts else contextlib.nullcontext()

    def do_with(self, step: Step) -> None:
        if step["fresh"] and self.program.contexts and step["context"] >= 0:
            context = self._context(self.program.contexts[step["context"] % len(self.program.contexts)])
        else:
            context = self.context(step["context"])
        with context:
            self.steps(step["body"], guarded=step["guarded"])

    def do_region(self, step: Step) -> None:
        with getattr(self, f"in_{step['op']}")(step):
            self.steps(step["body"], guarded=step["guarded"])

    def in_no_grad(self, step: Step) -> Any:
        return torch.no_grad()

    def in_enable_grad(self, step: Step) -> Any:
        return torch.enable_grad()

    def in_inference(self, step: Step) -> Any:
        return torch.inference_mode()

    def in_autocast(self, step: Step) -> Any:
        return torch.autocast(self.run.device.type, dtype=torch.bfloat16)

    def in_hooks_of_another(self, step: Step) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t)

    def in_eager_collector(self, step: Step) -> contextlib.AbstractContextManager[None]:
        return eager_collector()

    @contextlib.contextmanager
    def in_stream(self, step: Step) -> Iterator[None]:
        """On a side stream that waits for ours, and that ours waits for afterwards; on the disk tier nothing."""
        ours = self.current_stream()
        if ours is None:
            yield
            return
        side = self.streams.get(step["index"])
        if side is None:
            side = self.run.simulation.new_stream() if self.run.simulation else torch.cuda.Stream()
            self.streams[step["index"]] = side
        side.wait_stream(ours)
        try:
            with self.on_stream(side):
                yield
        finally:
            ours.wait_stream(side)

    def current_stream(self) -> Any:
        if self.run.simulation:
            return self.run.simulation.current_stream()
        return torch.cuda.current_stream() if self.run.device.type == "cuda" else None

    def on_stream(self, stream: Any) -> Any:
        if stream is None:
            return contextlib.nullcontext()
        return self.run.simulation.stream(stream) if self.run.simulation else torch.cuda.stream(stream)

    @contextlib.contextmanager
    def in_nothing(self, step: Step) -> Iterator[None]:
        yield

    def do_thread(self, step: Step) -> None:
        """The body on another thread, with our values; nothing runs here meanwhile."""
        self.join(self.on_thread(lambda: self.steps(step["body"])))

    def do_threads(self, step: Step) -> None:
        """Bodies on threads of their own at once, each with leaves that are copies of our values."""
        others = []
        for body in step["bodies"]:
            other = Interpreter(self.program, self.run, self, self.watches_storages)
            other.path = [*self.path, str(len(others))]
            for name, tensor in self.values.items():
                copied = tensor.detach().clone()
                other.values[name] = copied
                if name in step["leaves"] and (copied.is_floating_point() or copied.is_complex()):
                    other.leaves[name] = copied.requires_grad_()
            others.append((other, body))
        started = [self.on_thread(lambda o=other, b=body: o.steps(b)) for other, body in others]
        for thread in started:
            self.join(thread)
        for index, (other, _) in enumerate(others):
            other.note_gradients(f"of thread {index}")
            self.notes.join(other.notes)
            other.kept.clear()
            self.values |= {f"{name}t{index}": tensor for name, tensor in other.values.items()}
            leaves = {f"{name}t{index}": leaf for name, leaf in other.leaves.items()}
            for name in leaves.keys() & self.leaves.keys():
                self.leaves[name].grad = None  # under create_graph it holds a graph that holds the leaf
            self.leaves |= leaves
            other.values.clear()  # what a checkpoint recomputes holds the interpreter: a cycle that no collector sees
            other.leaves.clear()

    def on_thread(self, work: Callable[[], None]) -> threading.Thread:
        stream = self.current_stream()

        def guarded() -> None:
            with self.on_stream(stream), contextlib.nullcontext() if self.held is None else _Holder(self.held):
                work()

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def join(self, thread: threading.Thread) -> None:
        thread.join(JOIN_TIMEOUT_S)
        if thread.is_alive():
            raise RuntimeError("a thread hangs")
