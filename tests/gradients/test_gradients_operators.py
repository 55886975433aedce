"""PyTorch's own operators and modules: those that save oddly, those with state, those with many kernels."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from devices import Device
from gradients import Run, assert_same_gradients


def test_rrelu_saves_its_noise_before_it_fills_it(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(64, 64)
        with run.offload():
            y = functional.rrelu(x * 2, training=True)
            z = functional.rrelu(y * x, training=True, inplace=True).exp()
        z.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_native_batch_norm_saves_its_statistics_before_it_fills_them(device_under_test: Device):
    def program(run: Run):
        x, weight, bias = run.leaf(8, 64), run.parameter(64), run.parameter(64)
        mean, variance = run.tensor(64), run.tensor(64).abs()
        with run.offload():
            y, *_ = torch._native_batch_norm_legit(x * 1, weight, bias, mean, variance, True, 0.1, 1e-5)
            z, *_ = torch._native_batch_norm_legit(y.sin(), weight, bias, mean, variance, True, 0.1, 1e-5)
        z.square().sum().backward()
        return x.grad, weight.grad, mean, variance

    assert_same_gradients(program, device=device_under_test)


def test_a_fresh_buffer_filled_by_the_operator_that_saves_it(device_under_test: Device):
    """As rrelu does, but with the noise visible: the operator's write must be in the copy."""

    def program(run: Run):
        x = run.leaf(64, 64)
        with run.offload():
            for _ in range(4):
                noise = torch.empty_like(x).fill_(7)
                y = torch.ops.aten.rrelu_with_noise(x * 3, noise, 0.1, 0.4, True)
                run.check(noise=noise)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize("dimension", [1, 2])
def test_batch_norm_over_steps(device_under_test: Device, dimension: int):
    def program(run: Run):
        layer = [nn.BatchNorm1d, nn.BatchNorm2d][dimension - 1]
        model = run.module(lambda: nn.Sequential(layer(8), nn.ReLU(inplace=True), layer(8), nn.ReLU(inplace=True)))
        x = run.leaf(4, 8, *[6] * dimension)
        for _ in range(3):
            with run.offload():
                y = model(x)
            y.square().sum().backward()
        run.check(buffers=list(model.buffers()))
        model.eval()
        with run.offload():
            y = model(x).sin()
        y.sum().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.except_devices("privateuseone")  # PyTorch wants fused cells of such a device's own
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_networks(device_under_test: Device, kind: type[nn.RNNBase], bidirectional: bool):
    def program(run: Run):
        model = run.module(lambda: kind(16, 16, num_layers=2, bidirectional=bidirectional, batch_first=True))
        x = run.leaf(3, 5, 16)
        for _ in range(2):
            with run.offload():
                y, state = model(x)
                z = y.sin().sum() + (state[0] if isinstance(state, tuple) else state).sum()
            z.backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


BACKENDS = {
    "math": [SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
}


@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "additive", "expanded"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_kernels_with_masks(device_under_test: Device, backend: str, mask: str):
    on_cuda = device_under_test.name == "cuda"
    if not on_cuda and backend in ("efficient", "cudnn"):
        pytest.skip(f"the {backend} kernel is CUDA's")
    dtype = torch.float16 if on_cuda and backend != "math" else torch.float32

    def program(run: Run):
        qkv = run.leaf(2, 64, 3, 4, 16, dtype=dtype)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        masks = {
            "boolean": run.tensor(64, 64).gt(-0.5) | torch.eye(64, dtype=torch.bool, device=run.device),
            "additive": run.tensor(2, 4, 64, 64, dtype=dtype),
            "expanded": run.tensor(64, dtype=dtype).expand(2, 4, 64, 64),
        }
        with run.offload(), sdpa_kernel(BACKENDS[backend]):
            attended = functional.scaled_dot_product_attention(
                q * 2, k * 2, v * 2, attn_mask=masks.get(mask), is_causal=mask == "causal"
            )
        attended.square().sum().backward()
        return qkv.grad

    if on_cuda and backend == "flash" and mask not in ("none", "causal"):
        for stock in (True, False):
            with pytest.raises(RuntimeError, match="No available kernel"):  # CUDA's flash kernel takes no mask
                program(Run(device_under_test, stock=stock, context=None))
        return
    try:
        program(Run(device_under_test, stock=True, context=None))
    except RuntimeError as error:
        pytest.skip(f"torch has no {backend} kernel for this: {str(error).splitlines()[0]}")
    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_of_every_kind(device_under_test: Device, inplace: bool):
    def program(run: Run):
        x = run.leaf(4, 8, 8)
        for _ in range(3):
            with run.offload():
                y = functional.dropout(x * 2, 0.3, inplace=inplace).exp()
                y = functional.alpha_dropout(y, 0.2, training=True).sin()
                y = functional.dropout1d(y * 1, 0.2, inplace=inplace)
                y = functional.dropout(y.sin(), 0.2)
            y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_its_weight_cache(device_under_test: Device, dtype: torch.dtype):
    def program(run: Run):
        model = run.module(lambda: nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32)))
        model[3].weight = model[0].weight  # the cache's copy is used twice
        x = run.leaf(16, 32)
        for _ in range(2):
            with torch.autocast(run.device.type, dtype), run.offload():
                y = model(model(x)).float()
            y.square().sum().backward()
        with run.offload(), torch.autocast(run.device.type, dtype):
            z = model(x)
            z = model(z).float().sin()
        z.sum().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_embeddings_and_losses(device_under_test: Device):
    def program(run: Run):
        embedding = run.module(lambda: nn.Embedding(64, 32, padding_idx=0, max_norm=0.9))
        bag = run.module(lambda: nn.EmbeddingBag(64, 32, mode="max"))
        indices = (run.tensor(4, 16) * 32 + 32).long()
        with run.offload():
            x = embedding(indices).flatten(0, 1) + bag(indices).mean()
            losses = [
                functional.cross_entropy(x, indices.flatten() % 32, label_smoothing=0.1),
                functional.mse_loss(x, x.detach().flip(0)),
                functional.smooth_l1_loss(x, x.detach() * 2),
                functional.binary_cross_entropy_with_logits(x, (x > 0).float()),
                functional.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="batchmean"),
            ]
        sum(losses).backward()
        return embedding.weight.grad, bag.weight.grad, losses

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.except_devices("privateuseone")  # it has strided tensors only
def test_sparse_gradients_and_sparse_operands(device_under_test: Device):
    def program(run: Run):
        embedding = run.module(lambda: nn.Embedding(64, 32, sparse=True))
        indices = (run.tensor(4, 16) * 32 + 32).long()
        dense = run.leaf(32, 16)
        sparse = run.tensor(32, 32).relu().to_sparse().requires_grad_()
        with run.offload():
            y = embedding(indices).exp().sum() + torch.sparse.mm(sparse, dense.exp()).square().sum()
        y.backward()
        return embedding.weight.grad, dense.grad, sparse.grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_gradients(program, device=device_under_test, kept_reason="layout", min_moved_fraction=0.5)


def test_pooling_and_convolutions(device_under_test: Device):
    def program(run: Run):
        model = run.module(
            lambda: nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1, bias=False),
                nn.GroupNorm(2, 8),
                nn.SiLU(inplace=True),
                nn.MaxPool2d(2, ceil_mode=True),
                nn.ConvTranspose2d(8, 4, 3, stride=2),
                nn.InstanceNorm2d(4, affine=True),
                nn.Hardswish(),
                nn.AdaptiveAvgPool2d(3),
                nn.Conv2d(4, 4, 3, groups=4),
                nn.PReLU(),
            )
        )
        x = run.leaf(2, 3, 9, 9)
        with run.offload():
            y = model(x)
        y.square().sum().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_indexing_sorting_and_scans(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        index = (run.tensor(32, 32) * 16 + 16).long()
        with run.offload():
            a = x.exp()
            y = a.gather(1, index) * a.sort(dim=0).values + a.cumprod(dim=1) + a.cummax(dim=0).values
            y = y + a.scatter_add(0, index, a.t()) + a.index_select(0, index[0]) + a[index[0], index[1]]
            y = y * a.topk(32, dim=1).values + torch.where(index > 16, a, a.t()) + a.logcumsumexp(0)
            y = y + a.masked_fill(index > 20, 3.0) + a.roll(3, 1) * a.clamp(0.5, 2) + a.max(1, keepdim=True).values
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_linear_algebra(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(16, 16)
        with run.offload():
            a = x @ x.mT + 16 * torch.eye(16, device=run.device)
            y = (
                torch.linalg.cholesky(a)
                + torch.linalg.inv(a)
                + torch.linalg.solve(a, x)
                + torch.linalg.matrix_exp(x / 9)
            )
            y = y.sum() + torch.linalg.eigvalsh(a).sum() + torch.linalg.det(a).log() + torch.linalg.svdvals(x).sum()
            y = y + torch.einsum("ij,kj,kl->il", x, a, x).sum() + torch.fft.rfft(x).abs().sum()
        y.backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_foreach_stack_and_split(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            parts = x.exp().split([8, 16, 8])
            y = torch.cat([part.sin() * part for part in parts]).unflatten(0, (2, 16))
            z = torch.stack(y.unbind(0), dim=2).prod(dim=2)
        z.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_torch_utils_parametrizations(device_under_test: Device):
    def program(run: Run):
        model = run.module(
            lambda: nn.Sequential(
                nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
                nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
                nn.utils.parametrizations.orthogonal(nn.Linear(16, 16)),
            )
        )
        x = run.leaf(8, 16)
        for _ in range(2):
            with run.offload():
                y = model(x).sin()
            y.sum().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_transformer_encoder_layers(device_under_test: Device):
    def program(run: Run):
        layer = run.module(lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True))
        x, padding = run.leaf(2, 8, 32), torch.zeros(2, 8, dtype=torch.bool, device=run.device)
        padding[1, 5:] = True
        for _ in range(2):
            with run.offload():
                y = layer(x, src_key_padding_mask=padding)
            y.square().sum().backward()
        return layer, x.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded", "cuda")
def test_cpu_tensors_among_those_of_the_device(device_under_test: Device):
    """A tensor of a device without an engine stays, counted, with one warning; what comes back is where it was."""

    def program(run: Run):
        x, foreign = run.leaf(32, 32), run.foreign[0].requires_grad_()
        with run.offload():
            a, b = x.exp(), (foreign * foreign).sum()
            run.check(device=str(a.grad_fn._saved_result.device))
            y = a.sum() + b.to(run.device)
        y.backward()
        return x.grad, foreign.grad

    with pytest.warns(UserWarning, match="stay where they are"):
        assert_same_gradients(program, device=device_under_test, moved_bytes=4096, kept_reason="device")
