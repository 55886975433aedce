"""operators.py: the operators that random programs are made of, by name, so that coverage can be printed.

Each takes tensors of any shape and real or complex dtype, and fits them to what it needs by views and casts, which
autograd sees too. Values are kept in range where that is cheap; a NaN compares like any other bits.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

SIDE = 16
Operator = Callable[..., torch.Tensor]
_TOO_HARD_TO_TELL = 2  # PyTorch refuses to write to a tensor only if its elements surely share memory


def fit(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Any tensor in any shape: by expanding it where that can be, else by repeating and cutting its elements."""
    shape = tuple(shape)
    if tensor.shape == shape:
        return tensor
    if tensor.dim() <= len(shape) and all(
        mine in (1, theirs) for mine, theirs in zip(reversed(tensor.shape), reversed(shape), strict=False)
    ):
        return tensor.expand(shape)
    if tensor.numel() == 0:
        return tensor.new_zeros(shape)
    flat, count = tensor.reshape(-1), math.prod(shape)
    if flat.numel() < count:
        flat = flat.repeat(-(-count // flat.numel()))
    return flat[:count].view(shape)


def real(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.real
    return tensor if tensor.is_floating_point() else tensor.float()


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """(SIDE, SIDE) in float32 or float64: what linear algebra takes."""
    fitted = fit(real(tensor), (SIDE, SIDE))
    return fitted if fitted.dtype in (torch.float32, torch.float64) else fitted.float()


def image(tensor: torch.Tensor) -> torch.Tensor:
    return matrix(tensor).view(1, 4, 8, 8)


def positive(tensor: torch.Tensor) -> torch.Tensor:
    return matrix(tensor).abs() + 0.1


def definite(tensor: torch.Tensor) -> torch.Tensor:
    m = matrix(tensor).tanh()
    return m @ m.t() + SIDE * torch.eye(SIDE, dtype=m.dtype, device=m.device)


def ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Indices into a matrix's rows, as its values have it."""
    return matrix(tensor).detach().argsort(dim=0, stable=True)


def labels(tensor: torch.Tensor) -> torch.Tensor:
    return matrix(tensor).detach().argmax(dim=1)


def attention(q: torch.Tensor, k: torch.Tensor, **options: bool) -> torch.Tensor:
    heads = [matrix(t).view(1, SIDE, 2, 8).transpose(1, 2) for t in (q, k)]
    return F.scaled_dot_product_attention(heads[0], heads[1], heads[0] * 0.5, **options)


def complex_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(matrix(tensor).reshape(SIDE, SIDE // 2, 2))


UNARY: dict[str, Operator] = {
    "sin": torch.sin,
    "exp": lambda t: real(t).clamp(-3, 3).exp(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": lambda t: real(t).relu(),
    "gelu": lambda t: F.gelu(real(t)),
    "silu": lambda t: F.silu(real(t)),
    "softplus": lambda t: F.softplus(real(t)),
    "elu": lambda t: F.elu(real(t)),
    "leaky_relu": lambda t: F.leaky_relu(real(t)),
    "leaky_relu_in_place": lambda t: F.leaky_relu(real(t) * 2, inplace=True),
    "hardswish": lambda t: F.hardswish(matrix(t)),
    "mish": lambda t: F.mish(matrix(t)),
    "abs": torch.abs,
    "square": torch.square,
    "sqrt": lambda t: (real(t).abs() + 0.1).sqrt(),
    "rsqrt": lambda t: positive(t).rsqrt(),
    "log1p": lambda t: real(t).abs().log1p(),
    "pow3": lambda t: t.clamp(-2, 2).pow(3) if not t.is_complex() else t * 0.5,
    "reciprocal": lambda t: positive(t).reciprocal(),
    "erf": lambda t: matrix(t).erf(),
    "atan": lambda t: matrix(t).atan(),
    "expm1": lambda t: matrix(t).clamp(-2, 2).expm1(),
    "logsigmoid": lambda t: F.logsigmoid(matrix(t)),
    "clamp": lambda t: real(t).clamp(-0.5, 0.5),
    "neg": torch.neg,
    "scale": lambda t: t * 0.5,
    "times_itself": lambda t: t * t,
    "where_positive": lambda t: torch.where(real(t) > 0, real(t), 0.1),
    "sum": lambda t: t.sum(-1, keepdim=True) if t.dim() else t.sum(),
    "mean": lambda t: real(t).mean(),
    "logsumexp": lambda t: matrix(t).logsumexp(1),
    "max_of_rows": lambda t: matrix(t).max(dim=1).values,
    "amax": lambda t: matrix(t).amax(0),
    "norm": lambda t: matrix(t).norm(dim=1, keepdim=True),
    "prod": lambda t: positive(t).clamp(0.5, 1.5).prod(0),
    "std": lambda t: matrix(t).std(dim=1, keepdim=True),
    "var": lambda t: matrix(t).var(dim=0),
    "cumsum": lambda t: matrix(t).cumsum(0),
    "cumprod": lambda t: matrix(t).tanh().cumprod(1),
    "logcumsumexp": lambda t: matrix(t).logcumsumexp(0),
    "amin": lambda t: matrix(t).aminmax(dim=1)[0],
    "topk": lambda t: matrix(t).topk(5, dim=1).values,
    "sort": lambda t: matrix(t).sort(dim=1, stable=True).values,
    "cummax": lambda t: matrix(t).cummax(0).values,
    "softmax": lambda t: matrix(t).softmax(-1),
    "log_softmax": lambda t: matrix(t).log_softmax(0),
    "layer_norm": lambda t: F.layer_norm(matrix(t), (SIDE,)),
    "rms_norm": lambda t: F.rms_norm(matrix(t), (SIDE,)),
    "group_norm": lambda t: F.group_norm(image(t), 2),
    "batch_norm": lambda t: F.batch_norm(image(t), None, None, training=True),
    "normalize": lambda t: F.normalize(matrix(t)),
    "times_transposed": lambda t: matrix(t) * matrix(t).t(),
    "gram": lambda t: matrix(t) @ matrix(t).t() / SIDE,
    "cholesky": lambda t: torch.linalg.cholesky(definite(t)),
    "inverse": lambda t: torch.linalg.inv(definite(t)),
    "slogdet": lambda t: torch.linalg.slogdet(definite(t)).logabsdet,
    "matrix_exp": lambda t: torch.linalg.matrix_exp(matrix(t).tanh() / SIDE),
    "tril": lambda t: matrix(t).tril(),
    "trace": lambda t: matrix(t).trace(),
    "max_pool": lambda t: F.max_pool2d(image(t), 2),
    "avg_pool": lambda t: F.avg_pool2d(image(t), 2),
    "interpolate": lambda t: F.interpolate(image(t), scale_factor=2, mode="nearest"),
    "pixel_shuffle": lambda t: F.pixel_shuffle(image(t), 2),
    "channels_last": lambda t: image(t).contiguous(memory_format=torch.channels_last).sin(),
    "embedding": lambda t: F.embedding(labels(t), matrix(t)),
    "gather": lambda t: matrix(t).gather(0, ranks(t)),
    "index_select": lambda t: matrix(t).index_select(0, labels(t)),
    "masked_fill": lambda t: matrix(t).masked_fill(matrix(t) > 0.5, 0.25),
    "masked_select": lambda t: matrix(t).masked_select(matrix(t) > 0),
    "roll": lambda t: matrix(t).roll(3, 1),
    "flip": lambda t: t.flip(0) if t.dim() else t * 1,
    "repeat": lambda t: matrix(t)[:4].repeat(2, 1),
    "pad": lambda t: F.pad(matrix(t)[1:-1, 1:-1], (1, 1, 1, 1), value=0.5),
    "split_cat": lambda t: torch.cat([part.sin() for part in matrix(t).split(5)][::-1]),
    "unbind_stack": lambda t: torch.stack([row * row for row in matrix(t)[:4].unbind()]),
    "fft": lambda t: torch.fft.irfft(torch.fft.rfft(matrix(t)), n=SIDE),
    "complex_product": lambda t: complex_of(t).conj() * complex_of(t * 2),
    "angle": lambda t: complex_of(t).abs(),
    "through_double": lambda t: real(t).double().sin().float(),
    "through_bfloat16": lambda t: real(t).bfloat16().tanh().float(),
    "to_half": lambda t: matrix(t).clamp(-9, 9).half().sin(),
    "sparse_mm": lambda t: torch.sparse.mm((matrix(t).detach() > 0).float().to_sparse(), matrix(t).float()),
    "foreach": lambda t: torch._foreach_exp([matrix(t).clamp(-2, 2), matrix(t).tanh()])[1],
    "vmap": lambda t: torch.vmap(lambda row: row.sin() * row)(matrix(t)),
    "dropout": lambda t: F.dropout(real(t), 0.3),
    "rrelu": lambda t: F.rrelu(matrix(t), training=True),
    "self_attention": lambda t: attention(t, t, is_causal=True),
}
RANDOM = {"dropout", "rrelu"}  # draw from the process's generator, which threads share

BINARY: dict[str, Operator] = {
    "add": lambda a, b: a + fit(b, a.shape),
    "sub": lambda a, b: a - fit(b, a.shape),
    "mul": lambda a, b: a * fit(b, a.shape) * 0.5,
    "div": lambda a, b: matrix(a) / positive(b),
    "matmul": lambda a, b: matrix(a).float() @ matrix(b).float() / SIDE,
    "addmm": lambda a, b: torch.addmm(matrix(a).float(), matrix(b).float(), matrix(a).float(), alpha=0.1),
    "bmm": lambda a, b: torch.bmm(matrix(a).float().view(4, 4, SIDE), matrix(b).float().view(4, SIDE, 4)),
    "linear": lambda a, b: F.linear(matrix(a).float(), matrix(b).float(), matrix(b).float()[0]) / SIDE,
    "mv": lambda a, b: matrix(a).float().mv(matrix(b).float()[3]),
    "outer": lambda a, b: torch.outer(matrix(a)[0], matrix(b)[:, 1]),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", matrix(a).float(), matrix(b).float()) / SIDE,
    "solve": lambda a, b: torch.linalg.solve(definite(a).float(), matrix(b).float()),
    "maximum": lambda a, b: torch.maximum(matrix(a), matrix(b)),
    "minimum": lambda a, b: torch.minimum(matrix(a), matrix(b)),
    "atan2": lambda a, b: torch.atan2(matrix(a), positive(b)),
    "hypot": lambda a, b: torch.hypot(matrix(a).float(), positive(b).float()),
    "pow": lambda a, b: positive(a).clamp(0.1, 2).pow(matrix(b).clamp(-1, 1)),
    "lerp": lambda a, b: torch.lerp(matrix(a).float(), matrix(b).float(), 0.3),
    "addcmul": lambda a, b: torch.addcmul(matrix(a), matrix(b), matrix(a), value=0.2),
    "addcdiv": lambda a, b: torch.addcdiv(matrix(a), matrix(b), positive(a), value=0.2),
    "logaddexp": lambda a, b: torch.logaddexp(matrix(a).float(), matrix(b).float()),
    "where": lambda a, b: torch.where(matrix(a) > 0, matrix(a), matrix(b)) * matrix(b),
    "prelu": lambda a, b: F.prelu(matrix(a).float(), matrix(b).float()[0]),
    "cat": lambda a, b: torch.cat([matrix(a)[:8], matrix(b)[8:]]),
    "stack": lambda a, b: torch.stack([matrix(a)[:4], matrix(b)[:4]]),
    "mse": lambda a, b: F.mse_loss(matrix(a), matrix(b), reduction="none"),
    "smooth_l1": lambda a, b: F.smooth_l1_loss(matrix(a), matrix(b), reduction="none"),
    "binary_cross_entropy": lambda a, b: F.binary_cross_entropy_with_logits(matrix(a), matrix(b).sigmoid()),
    "cross_entropy": lambda a, b: F.cross_entropy(matrix(a), labels(b)),
    "kl_div": lambda a, b: F.kl_div(matrix(a).log_softmax(1), matrix(b).softmax(1), reduction="batchmean"),
    "cosine_similarity": lambda a, b: F.cosine_similarity(matrix(a).float(), matrix(b).float()),
    "cdist": lambda a, b: torch.cdist(matrix(a).float()[:4], matrix(b).float()[4:]),
    "bilinear": lambda a, b: F.bilinear(matrix(a).float(), matrix(b).float(), matrix(b).float().view(1, SIDE, SIDE)),
    "glu": lambda a, b: F.glu(torch.cat([matrix(a), matrix(b)], dim=1)),
    "scatter": lambda a, b: matrix(a).scatter(0, ranks(a), matrix(b)),
    "scatter_add": lambda a, b: matrix(a).scatter_add(0, ranks(b), matrix(b).to(matrix(a).dtype)),
    "index_add": lambda a, b: matrix(a).float().index_add(0, ranks(b)[:, 0], matrix(b).float()),
    "index_put": lambda a, b: matrix(a).float().index_put((ranks(b)[:, 0],), matrix(b).float()),
    "masked_scatter": lambda a, b: matrix(a).float().masked_scatter(matrix(b) > 0, matrix(b).float()),
    "take_along_dim": lambda a, b: matrix(a).take_along_dim(ranks(b), 0),
    "conv2d": lambda a, b: F.conv2d(image(a).float(), matrix(b).float().view(-1)[:144].view(4, 4, 3, 3), padding=1),
    "attention": lambda a, b: attention(a.float() if not a.is_complex() else a, real(b).float()),
    "gru_cell": lambda a, b: torch.gru_cell(
        matrix(a).float()[:, :4], matrix(b).float()[:, :4], *[fit(matrix(b).float(), (12, 4))] * 2
    ),
    "lstm_cell": lambda a, b: torch.lstm_cell(
        matrix(a).float()[:, :4], (matrix(b).float()[:, :4], matrix(a).float()[:, 4:8]),
        *[fit(matrix(b).float(), (16, 4))] * 2,
    )[1],
}  # fmt: skip

VIEWS: dict[str, Operator] = {
    "transposed": lambda t: t.transpose(0, -1) if t.dim() else t.view(1),
    "t": lambda t: matrix(t).t(),
    "rows": lambda t: fit(t, (SIDE, SIDE))[3:9],
    "rows_and_columns": lambda t: fit(t, (SIDE, SIDE))[2:13, 4:],
    "every_third": lambda t: fit(t, (SIDE, SIDE))[::3],
    "select": lambda t: fit(t, (SIDE, SIDE)).select(1, 5),
    "narrow": lambda t: fit(t, (SIDE, SIDE)).narrow(1, 2, 9),
    "diagonal": lambda t: fit(t, (SIDE, SIDE)).diagonal(),
    "expand_row": lambda t: fit(t, (SIDE, SIDE))[3:4].expand(SIDE, SIDE),
    "expand_column": lambda t: fit(t, (SIDE, SIDE))[:, :1].expand(SIDE, SIDE),
    "expand_batch": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "squeeze": lambda t: t.unsqueeze(-1).squeeze(),
    "reshape": lambda t: fit(t, (4, SIDE, 4)),
    "permute": lambda t: fit(t, (4, SIDE, 4)).permute(2, 0, 1),
    "as_strided": lambda t: fit(t, (SIDE, SIDE)).as_strided((SIDE, SIDE), (1, SIDE)),
    "overlapping": lambda t: fit(t, (SIDE, SIDE)).reshape(-1)[5:].unfold(0, SIDE, 7)[:SIDE],
    "movedim": lambda t: t.movedim(0, -1) if t.dim() else t.view(1),
    "second_of_split": lambda t: fit(t, (SIDE, SIDE)).split(7)[1],
    "first_of_unbind": lambda t: fit(t, (SIDE, SIDE)).unbind()[1],
    "flatten": lambda t: t.flatten(),
    "alias": lambda t: t[...],
    "detach": lambda t: t.detach(),
    "conj": lambda t: t.conj() if t.is_complex() else t.view(t.shape),
    "imag": lambda t: t.imag if t.is_complex() else t.view(t.shape),
    "view_as_real": lambda t: torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.view(t.shape),
    "view_as_complex": lambda t: complex_of(t),
    "negative_view": lambda t: torch._neg_view(real(t)),
    "contiguous": lambda t: t.contiguous(),
    "clone": lambda t: t.clone(),
}

IN_PLACE: dict[str, Operator] = {
    "add_": lambda t: t.add_(1),
    "mul_": lambda t: t.mul_(0.5),
    "sigmoid_": lambda t: t.sigmoid_(),
    "tanh_": lambda t: t.tanh_(),
    "relu_": lambda t: t.relu_(),
    "exp_": lambda t: t.clamp_(-2, 2).exp_(),
    "clamp_": lambda t: t.clamp_(-0.7, 0.7),
    "addcmul_": lambda t: t.addcmul_(t.detach(), t.detach(), value=0.1),
    "copy_": lambda t: t.copy_(t.detach().flip(0)),
    "fill_": lambda t: t.fill_(0.25),
    "masked_fill_": lambda t: t.masked_fill_(real(t) > 0.2, 0.1),
    "zero_rows": lambda t: t[2:5].zero_(),
    "sub_transposed": lambda t: t.t().sub_(0.25),
    "mul_column": lambda t: t[:, 1].mul_(3),
    "set_row": lambda t: t.__setitem__(1, t.detach()[0]),
    "add_of_flat_view": lambda t: t.view(-1)[7:50].add_(1),
    "square_diagonal": lambda t: t.diagonal().square_(),
    "mul_of_detached": lambda t: t.detach().mul_(0.9),
    "without_grad": lambda t: torch.no_grad()(lambda: t.mul_(0.8))(),
    "requires_grad_": lambda t: t.requires_grad_(),
}


def is_undefined_in_place(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, and PyTorch writes to them nonetheless: on CUDA nothing orders these writes."""
    if tensor.layout is not torch.strided or torch._debug_has_internal_overlap(tensor) != _TOO_HARD_TO_TELL:
        return False
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return places.unique().numel() < places.numel()


def in_place(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Write to a tensor, unless what comes of it is undefined."""
    return tensor if is_undefined_in_place(tensor) else IN_PLACE[name](tensor)


def apply_chain(names: Sequence[str], tensor: torch.Tensor) -> torch.Tensor:
    for name in names:
        change = UNARY.get(name) or VIEWS.get(name)
        tensor = in_place(name, tensor) if change is None else change(tensor)
    return tensor


def _only_products() -> tuple[object, object]:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.sin.default])


def checkpointed(kind: str, run: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """`run(tensor)` under a checkpoint: "reentrant", "plain", "selective" or "nested"."""
    if kind == "nested":
        return checkpointed("plain", lambda t: checkpointed("plain", run, t).sin(), tensor)
    options = {"context_fn": _only_products} if kind == "selective" else {}
    return checkpoint(run, tensor, use_reentrant=kind == "reentrant", **options)
