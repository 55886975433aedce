"""head_models.py: models that keep their output head in every place where one is looked for."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from torchoffload._pytorch.hook_stack import top_pack_hook

WIDTH = 4


class Head(nn.Linear):
    """A head that looks at the thread's hooks while it runs."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(WIDTH, WIDTH)
        self.error = error
        self.hooks: list[str] = []

    def forward(self, x):
        self.hooks.append(name_of(top_pack_hook()))
        if self.error is not None:
            raise self.error
        return super().forward(x)


def name_of(pack_hook):
    """The name of a pack hook: "pack" is that of a context, "noop_pack" that of NoOpManager and of a head."""
    return "none" if pack_hook is None else pack_hook.__name__


class Holder(nn.Module):
    """A body, and children under the names given."""

    def __init__(self, **children) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x):
        x = F.gelu(self.body(x))
        for name, child in self.named_children():
            if name != "body":
                x = child(x)
        return x


class WithOutputEmbeddings(Holder):
    def get_output_embeddings(self):
        return self.unusual_name


class RaisesOutputEmbeddings(Holder):
    def get_output_embeddings(self):
        raise NotImplementedError("this model has none")

    @property
    def output(self):
        raise RuntimeError("not built yet")


class TiedHead:
    """As torchtune's TiedLinear: callable, but no module; its `linear` runs, with another's weight."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hooks = []

        def forward(self, x, weight):
            self.hooks.append(name_of(top_pack_hook()))
            return F.linear(x, weight)

    def __init__(self, tied: nn.Linear) -> None:
        self.tied = tied
        self.linear = TiedHead.Linear()

    def __call__(self, x):
        return self.linear(x, self.tied.weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.output = TiedHead(self.body)

    def forward(self, x):
        return self.output(F.gelu(self.body(x)))


def peft_like(head):
    base = Holder(model=Holder(lm_head=head))
    peft = Holder(base_model=base)
    peft.peft_config = {"default": object()}
    return peft


def chunked(head):
    return Holder(output=nn.ModuleList([head]))


MODELS = {
    "output": lambda head: Holder(output=head),
    "lm_head": lambda head: Holder(lm_head=head),
    "head": lambda head: Holder(head=head),
    "get_output_embeddings": lambda head: WithOutputEmbeddings(unusual_name=head),
    "raising get_output_embeddings": lambda head: RaisesOutputEmbeddings(lm_head=head),
    "decoder": lambda head: Holder(decoder=Holder(output=head)),
    "language_model": lambda head: Holder(language_model=Holder(lm_head=head)),
    "model": lambda head: Holder(model=Holder(lm_head=head)),
    "text_model": lambda head: Holder(text_model=Holder(head=head)),
    "nested twice": lambda head: Holder(model=Holder(language_model=Holder(lm_head=head))),
    "PEFT": peft_like,
    "DataParallel": lambda head: nn.DataParallel(Holder(lm_head=head)),
    "compiled": lambda head: torch.compile(Holder(lm_head=head), backend="eager"),
    "FSDP1": lambda head: Holder(_fsdp_wrapped_module=Holder(lm_head=head)),
    "checkpoint wrapper": lambda head: checkpoint_wrapper(Holder(lm_head=head)),
    "PEFT in DataParallel": lambda head: nn.DataParallel(peft_like(head)),
    "compiled PEFT": lambda head: torch.compile(peft_like(head), backend="eager"),
}


def train(model, context):
    """Gradients of one step with forward inside `context`."""
    torch.manual_seed(3)
    x = torch.randn(2, WIDTH, requires_grad=True)
    with context:
        loss = model(x).square().sum()
    loss.backward()
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return gradients


def hook_count(head):
    return len(head._forward_pre_hooks), len(head._forward_hooks), len(head._forward_hooks_always_called)
