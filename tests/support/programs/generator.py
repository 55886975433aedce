"""generator.py: draws a program from a seed. All choices are made here; the interpreter makes none."""

import random
from typing import Any

from programs.custom import FAILING, FUNCTIONS, HOOKS
from programs.operators import BINARY, IN_PLACE, RANDOM, SIDE, UNARY, VIEWS
from programs.program import Program, Step

STEP_COUNT = 48
CALM = sorted(set(FUNCTIONS) - FAILING)
CHAIN = ["sin", "gelu", "softmax", "gram", "times_itself", "dropout", "layer_norm", "t", "rows", "detach", "sigmoid"]
SHAPES = [[SIDE, SIDE]] * 12 + [[SIDE], [], [0, SIDE], [4, 8, SIDE], [5, 7], [48, 48]]
DTYPES = ["float32"] * 9 + ["float64", "bfloat16", "complex64"]
REGIONS = ["no_grad", "enable_grad", "inference", "autocast", "eager_collector", "stream", "stream", "stream",
           "hooks_of_another", "nothing"]  # fmt: skip

# How often a kind of step is drawn, before each program bends the weights its own way.
WEIGHTS = {
    "unary": 26, "binary": 14, "view": 11, "custom": 8, "in_place": 4, "checkpoint": 3, "with": 7, "region": 3,
    "backward": 6, "grad": 3, "read": 3, "drop": 5, "cycle": 1, "collect": 1, "mark": 0.4, "hook": 1.5, "leaf": 1.5,
    "save_again": 1.5, "thread": 0.8, "threads": 0.5, "clear_gradients": 0.5, "trim": 0.3, "raise": 0.3, "fail": 0.7,
}  # fmt: skip
ALWAYS = {"unary", "binary", "with", "backward"}
OUTERMOST = {"thread", "threads"}


def generate(seed: int) -> Program:
    return _Generator(seed).program()


class _Generator:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.names: list[str] = []  # values that are thought to be there
        self.leaves: list[str] = []
        self.constants: set[str] = set()  # values that are thought to require no gradient
        self.count = 0
        self.left = self.random.randint(STEP_COUNT // 2, STEP_COUNT * 3 // 2)
        self.in_thread = 0
        self.under_other_hooks = False
        bend = [0.0, 0.5, 1.0, 1.0, 2.0]
        # A context inside a checkpoint takes the saved tensors from the checkpoint's own hooks, and with them what
        # those do: let a write to what was saved pass, and (selective) refuse a second backward. No program has both.
        self.contexts_in_checkpoints = self.random.random() < 0.3
        self.weights = {
            kind: weight * self.random.choice([each for each in bend if each or kind not in ALWAYS])
            for kind, weight in WEIGHTS.items()
        }
        if self.contexts_in_checkpoints:
            self.weights["in_place"] = self.weights["save_again"] = 0

    def program(self) -> Program:
        contexts = [self.options() for _ in range(self.random.randint(1, 3))]
        watches_storages = self.random.random() < 0.5
        steps = [self.leaf_of("parameter" if index == 2 else "leaf", [SIDE, SIDE]) for index in range(3)]
        if self.random.random() < 0.15:
            steps.append(self.leaf_of("two", [SIDE, SIDE]))
        while self.left > 0:
            # Most of a program is forwards under a context, as in use.
            steps.append(self.draw_with(0) if self.random.random() < 0.5 else self.draw(0))
        steps.append({"do": "backward", "of": self.wanted(6), "retain": False})
        return Program(self.seed, contexts, watches_storages, steps)

    def options(self) -> dict[str, Any]:
        window = self.random.choice([0, 0, 1500, 3000, 6000, None])
        kinds: list[dict[str, Any]] = [
            {}, {}, {},
            {"offload_window_bytes": window, "reload_window_bytes": self.random.choice([0, 1500, 5000, None])},
            {"min_offload_size": 600},
            {"max_fwd_stash_size": self.random.randint(1, 4)},
            {"use_streams": False},
            {"use_pin_memory": False},
            {"budget_bytes": self.random.choice([4096, 20000])},
        ]  # fmt: skip
        return self.random.choice(kinds)

    # ---- names ----

    def pick(self) -> str:
        """A value, the last ones more often: graphs get deep."""
        count = len(self.names)
        return self.names[max(self.random.randrange(count), self.random.randrange(count))]

    def wanted(self, count: int) -> list[str]:
        """Values worth a backward, the last ones first."""
        names = [name for name in self.names if name not in self.constants] or self.names
        return names[-self.random.randint(1, count) :]

    def made(self, *sources: str, constant: bool = False) -> str:
        self.count += 1
        name = f"v{self.count}"
        self.names.append(name)
        if constant or (sources and all(source in self.constants for source in sources)):
            self.constants.add(name)
        return name

    def operator(self, table: dict[str, Any]) -> str:
        names = [name for name in table if not (self.in_thread and name in RANDOM)]
        return self.random.choice(names)

    # ---- steps ----

    def draw(self, depth: int) -> Step:
        self.left -= 1
        kinds = [
            kind for kind in self.weights
            if not (kind in ("with", "region", "save_again") and (depth > 2 or self.under_other_hooks))
            and not (kind in OUTERMOST and (depth > 1 or self.in_thread or self.under_other_hooks))
            and not (kind == "leaf" and self.in_thread)
        ]  # fmt: skip
        (kind,) = self.random.choices(kinds, [self.weights[each] for each in kinds])
        if kind in ("with", "region", "thread", "threads"):
            return getattr(self, f"draw_{kind}")(depth)
        return getattr(self, f"draw_{kind}")()

    def body(self, depth: int, low: int = 2, high: int = 10) -> list[Step]:
        count = min(self.random.randint(low, high), max(self.left, 1))
        return [self.draw(depth + 1) for _ in range(count)]

    def draw_with(self, depth: int) -> Step:
        return {
            "do": "with",
            "context": self.random.choice([0, 0, 0, 0, 1, 1, 2, -1]),
            "fresh": self.random.random() < 0.3,
            "guarded": self.random.random() < 0.85,
            "body": self.body(depth, 3, 14),
        }

    def draw_region(self, depth: int) -> Step:
        kind = self.random.choice(REGIONS)
        before = len(self.names)
        step: Step = {"do": "region", "op": kind, "guarded": self.random.random() < 0.85, "body": []}
        if kind == "stream":
            step["index"] = self.random.randint(0, 1)
        short = kind in ("no_grad", "inference", "hooks_of_another", "eager_collector")
        # Autograd does not look at versions under the hooks of another, and ours within would.
        self.under_other_hooks = kind == "hooks_of_another"
        step["body"] = self.body(depth, 2, 4 if short else 8)
        self.under_other_hooks = False
        if kind in ("no_grad", "inference"):
            self.constants.update(self.names[before:])
        return step

    def draw_thread(self, depth: int) -> Step:
        return {"do": "thread", "body": self.body(depth)}

    def draw_threads(self, depth: int) -> Step:
        bodies, before, constants = [], list(self.names), set(self.constants)
        names: list[str] = []
        self.in_thread += 1
        for index in range(2):
            self.names, self.constants = list(before), set(constants)
            # Each thread enters a context of its own: hooks are a thread's.
            inside: Step = {"do": "with", "context": self.random.choice([0, 1]), "fresh": False, "guarded": True}
            inside["body"] = self.body(depth, 4, 9)
            bodies.append([inside, *self.body(depth, 1, 3), self.draw_backward()])
            names += [f"{name}t{index}" for name in self.names[len(before) :]]
        self.in_thread -= 1
        self.names, self.constants = before + names, constants
        return {"do": "threads", "leaves": [name for name in before if self.random.random() < 0.6], "bodies": bodies}

    def leaf_of(self, kind: str, shape: list[int], dtype: str = "float32") -> Step:
        name = self.made(constant=kind == "constant")
        if kind != "constant":
            self.leaves.append(name)
        return {"do": "leaf", "kind": kind, "shape": shape, "dtype": dtype, "out": name}

    def draw_leaf(self) -> Step:
        kind = self.random.choice(["leaf", "leaf", "constant", "parameter", "two"])
        dtype = self.random.choice(DTYPES) if kind in ("leaf", "constant") else "float32"
        return self.leaf_of(kind, self.random.choice(SHAPES), dtype)

    def draw_unary(self) -> Step:
        return self.from_one("unary", self.operator(UNARY))

    def draw_view(self) -> Step:
        op = self.operator(VIEWS)
        step = self.from_one("view", op)
        if op == "detach":
            self.constants.add(step["out"])
        return step

    def draw_custom(self) -> Step:
        names = [name for name in CALM if not (self.contexts_in_checkpoints and name == "InPlace")]
        return self.from_one("custom", self.random.choice(names))

    def draw_fail(self) -> Step:
        step = self.from_one("custom", self.random.choice(sorted(FAILING)))
        if self.random.random() < 0.5:
            self.names.remove(step["out"])  # it fails where a backward comes by, and seldom in each
        return step

    def from_one(self, kind: str, op: str) -> Step:
        x = self.pick()
        return {"do": kind, "op": op, "x": x, "out": self.made(x)}

    def draw_binary(self) -> Step:
        x, y = self.pick(), self.pick()
        return {"do": "binary", "op": self.operator(BINARY), "x": x, "y": y, "out": self.made(x, y)}

    def draw_in_place(self) -> Step:
        return {"do": "in_place", "op": self.operator(IN_PLACE), "x": self.pick()}

    def draw_save_again(self) -> Step:
        """A tensor that is saved, changed in place and saved again, and a gradient through the later save alone."""
        own = self.from_one("unary", self.random.choice(["scale", "tanh", "softmax"]))
        names = [own["out"]] * 2
        savers = [self.random.choice(["sin", "times_itself", "square", "exp"]) for _ in names]
        first, second = (
            {"do": "unary", "op": op, "x": x, "out": self.made(x)} for op, x in zip(savers, names, strict=True)
        )
        change = {"do": "in_place", "op": self.operator(IN_PLACE), "x": own["out"]}
        grad: Step = {"do": "grad", "of": [second["out"]], "source": [own["x"]], "retain": True, "create": False,
                      "out": self.made(constant=True)}  # fmt: skip
        return {"do": "with", "context": self.random.choice([0, 1]), "fresh": False, "guarded": True,
                "body": [own, first, change, second, grad]}  # fmt: skip

    def draw_checkpoint(self) -> Step:
        links = [link for link in CHAIN if not (self.in_thread and link in RANDOM)]
        links += [self.operator(UNARY), self.operator(VIEWS)]
        # It fills what it saved after it saved it, where a recomputation has stopped: PyTorch's gradient is wrong.
        links = [link for link in links if link != "rrelu"]
        kinds = ["reentrant", "plain", "plain", "nested"]
        inside = self.contexts_in_checkpoints and not self.under_other_hooks and self.random.random() < 0.7
        if not self.contexts_in_checkpoints:
            links.append(self.operator(IN_PLACE))
            kinds.append("selective")
        step = self.from_one("checkpoint", self.random.choice(kinds))
        step["chain"] = self.random.choices(links, k=self.random.randint(1, 5))
        if any(link in IN_PLACE for link in step["chain"]):
            step["chain"].insert(0, "sin")  # on a tensor of its own: recomputing, it would write into what was unpacked
        if inside:
            step["context"] = self.random.choice([-1, 0, 1])
        return step

    def draw_backward(self) -> Step:
        step: Step = {"do": "backward", "of": self.wanted(3), "retain": self.random.random() < 0.6}
        if self.random.random() < 0.3:
            step["of"] = [self.pick()]
        if self.random.random() < 0.1:
            step["create"] = True
        if self.random.random() < 0.1:
            step["inputs"] = [self.random.choice(self.leaves), self.pick()]
        return step

    def draw_grad(self) -> Step:
        of, create = self.wanted(2), self.random.random() < 0.4
        source = [self.random.choice(self.leaves) if self.random.random() < 0.6 else self.pick()]
        retain = create or self.random.random() < 0.8
        return {"do": "grad", "of": of, "source": source, "retain": retain, "create": create,
                "out": self.made(constant=not create)}  # fmt: skip

    def draw_read(self) -> Step:
        return {"do": "read", "x": self.pick(), "depth": self.random.randrange(3)}

    def draw_drop(self) -> Step:
        return self.without("drop")

    def draw_cycle(self) -> Step:
        return self.without("cycle")

    def without(self, kind: str) -> Step:
        name = self.random.choice(self.names)
        if len(self.names) < 5 or name in self.leaves[:3]:
            return {"do": "collect"}
        self.names.remove(name)
        return {"do": kind, "x": name}

    def draw_collect(self) -> Step:
        return {"do": "collect"}

    def draw_clear_gradients(self) -> Step:
        return {"do": "clear_gradients"}

    def draw_trim(self) -> Step:
        return {"do": "trim"}

    def draw_mark(self) -> Step:
        return {"do": "mark", "x": self.pick()}

    def draw_hook(self) -> Step:
        kinds = ["double", "look", "forward_and_backward", "fail"]
        return {"do": "hook", "op": self.random.choices(kinds, [3, 2, 2, 0.5])[0], "x": self.pick()}

    def draw_raise(self) -> Step:
        return {"do": "raise", "op": self.random.choice(["ValueError", "Interrupt"])}


# What a program can do without an error, as `Notes.done` counts it.
OPERATOR_NAMES = {
    f"{kind} {name}"
    for kind, names in {
        "unary": UNARY, "binary": BINARY, "view": VIEWS, "in_place": IN_PLACE, "custom": CALM, "region": REGIONS,
        "checkpoint": ["reentrant", "plain", "nested", "selective"], "hook": HOOKS,
    }.items()
    for name in names
} | {"backward", "grad", "read", "drop", "cycle", "collect", "mark", "leaf", "thread", "threads", "trim", "with",
     "clear_gradients"}  # fmt: skip
