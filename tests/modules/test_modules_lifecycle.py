"""offload_modules comes and goes: exceptions, threads, copies, remove(), and what is alive afterwards."""

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from gradients import Live, Run, assert_same_gradients, settled
from module_models import INPUT_BYTES, TOKENS, WIDTH, Layer, Stack, offload, options
from torchoffload._pytorch.hook_stack import innermost, top_pack_hook


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    assert innermost() is None
    assert top_pack_hook() is None


@pytest.fixture
def disk(tmp_path):
    """Options of the disk tier: it needs no accelerator."""
    return {"tier": "disk", "disk_dir": tmp_path, "min_offload_size": 0, "learn": False}


def batch() -> torch.Tensor:
    return torch.ones(TOKENS, WIDTH)


def hook_counts(model: nn.Module) -> set[tuple[int, int, int, int]]:
    return {
        (
            len(module._forward_pre_hooks),
            len(module._forward_pre_hooks_with_kwargs),
            len(module._forward_hooks),
            len(module._forward_hooks_always_called),
        )
        for module in model.modules()
    }


class Failing(Layer):
    """A layer that raises once, between attention and mlp."""

    error: BaseException | None = None

    def forward(self, x):
        x = x + self.attention(x)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return x + self.mlp(x)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_after_an_exception_inside_all_goes_on(device_under_test: Device, error):
    def program(run: Run):
        model, x = run.module(lambda: Stack(layer=Failing)), run.leaf(TOKENS, WIDTH)
        offload(run, device_under_test, model, ["layers.*", "layers.*.attention"])
        for _ in range(2):
            model.layers[1].error = error("in a layer")
            with pytest.raises(error, match="in a layer"):
                model(x)
            loss = model(x)
            loss.backward()
            run.check(loss=loss)
        return model, x.grad

    # What was saved on the way to the exception has moved too, but for copies that were pending.
    stats = assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)
    assert 2 * Stack.SAVED_BYTES <= stats.bytes_offloaded <= 4 * Stack.SAVED_BYTES
    assert innermost() is None


def test_after_an_interrupt_a_context_of_the_users_finds_a_clean_thread(disk):
    model = Stack(layer=Failing)
    torchoffload.offload_modules(model, "layers.*", **disk)
    model.layers[0].error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    assert top_pack_hook() is not None  # PyTorch runs no forward hook for a BaseException
    with torchoffload.OffloadActivations(**disk) as _:
        pass
    assert top_pack_hook() is None


def test_an_interrupt_that_the_model_swallows_leaves_its_call_paired(disk):
    class Swallowing(Stack):
        def forward(self, x):
            for layer in self.layers:
                try:
                    layer(x)
                except KeyboardInterrupt:
                    x = layer(x)
            return self.lm_head(x).sum()

    model = Swallowing(layer=Failing)
    handle = torchoffload.offload_modules(model, ["layers.*", "layers.*.mlp"], **disk)
    model.layers[1].error = KeyboardInterrupt()
    model(batch()).backward()
    assert innermost() is None
    assert handle.stats()[0].bytes_offloaded > 0


def test_an_error_in_anothers_hook_leaves_nothing_behind(disk):
    def fail(*_):
        raise ValueError("in a hook")

    model = Stack()
    torchoffload.offload_modules(model, "layers.*", **disk)
    for register in (
        lambda module: module.register_forward_pre_hook(fail),
        lambda module: module.register_forward_pre_hook(fail, prepend=True),
        lambda module: module.register_forward_hook(fail),
        lambda module: module.register_forward_hook(fail, prepend=True),
    ):
        for module in (model, model.layers[1]):
            handle = register(module)
            with pytest.raises(ValueError, match="in a hook"):
                model(batch())
            handle.remove()
            assert innermost() is None


def test_a_context_of_another_tier_around_is_an_error(disk):
    if not torch.cuda.is_available():
        pytest.skip("a context of the host tier cannot be entered here")
    model = Stack()
    torchoffload.offload_modules(model, "layers.*", **disk)
    with torchoffload.OffloadActivations(), pytest.raises(RuntimeError, match="must share a tier"):
        model(batch())


def test_remove_takes_all_hooks_away(disk):
    model = Stack()
    before = hook_counts(model)
    handle = torchoffload.offload_modules(model, "layers.*", **disk)
    other = torchoffload.offload_modules(model, "embed", **disk)
    assert hook_counts(model) != before
    handle.remove()
    handle.remove()
    torchoffload.reset_stats()
    model(batch()).backward()
    assert [row.name for row in other.stats()] == ["embed"]
    assert handle.stats()[0].bytes_saved == 0
    assert other.stats()[0].bytes_saved > 0
    other.remove()
    assert hook_counts(model) == before == {(0, 0, 0, 0)}
    again = torchoffload.offload_modules(model, "layers.*", **disk)
    again.remove()
    assert hook_counts(model) == before


def test_the_handle_is_a_context_manager(disk):
    model = Stack()
    with torchoffload.offload_modules(model, "layers.*", **disk) as handle:
        assert len(handle.names) == 3
        assert hook_counts(model) != {(0, 0, 0, 0)}
    assert hook_counts(model) == {(0, 0, 0, 0)}


def test_remove_with_graphs_alive(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        handle = offload(run, device_under_test, model, "layers.*")
        loss = model(x)
        if handle is not None:
            handle.remove()
            del handle
        gc.collect()
        (loss + model(x)).backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=Stack.SAVED_BYTES)


def test_remove_in_the_middle_of_a_call(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        handle = offload(run, device_under_test, model, "layers.*")
        if handle is not None:
            model.layers[1].attention.register_forward_hook(lambda *_: handle.remove())
        model(x).backward()
        model(x).backward()
        if handle is not None:
            assert innermost() is None
            kinds = hook_counts(model)
            assert kinds == {(0, 0, 0, 0), (0, 0, 1, 0)}  # the test's own
        return model, x.grad

    # The layer under way still moves what it saves.
    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * Layer.SAVED_BYTES)


def test_a_dropped_handle_changes_nothing(disk):
    model = Stack()
    torchoffload.offload_modules(model, "layers.*", **disk)
    gc.collect()
    torchoffload.reset_stats()
    model(batch()).backward()
    assert torchoffload.stats().bytes_offloaded == Stack.SAVED_BYTES


def test_nothing_outlives_the_model(disk):
    live = settled(Live.now(), timeout_s=0)
    model = Stack()
    handle = torchoffload.offload_modules(model, "layers.*", **disk)
    model(batch()).backward()
    offloading = weakref.ref(handle._offloading)
    context = weakref.ref(handle._offloading.manager)
    layer = weakref.ref(model.layers[0])
    del handle, model
    gc.collect()
    assert layer() is None
    assert offloading() is None
    assert context() is None
    assert settled(live) == live


def test_the_handle_may_outlive_the_model(disk):
    model = Stack()
    handle = torchoffload.offload_modules(model, "layers.*", **disk)
    model(batch()).backward()
    del model
    gc.collect()
    handle.remove()
    assert handle.stats()[0].bytes_offloaded == Layer.SAVED_BYTES
    assert repr(handle) == "OffloadedModules(3 of Stack: layers.0, layers.1, layers.2)"


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_does_not_offload_until_it_is_told_to(disk, again):
    model = Stack()
    handle = torchoffload.offload_modules(model, "layers.*", **disk)
    twin = again(model)
    torchoffload.reset_stats()
    expected = twin(batch())
    expected.backward()
    assert torchoffload.stats().handles == 0
    own = torchoffload.offload_modules(twin, "layers.1", **disk)
    assert hook_counts(twin) == {(0, 0, 0, 0), (1, 1, 1, 1)}
    assert torch.equal(twin(batch()), expected)
    assert torchoffload.stats().bytes_offloaded == Layer.SAVED_BYTES
    own.remove()
    handle.remove()
    assert hook_counts(model) == {(0, 0, 0, 0)}


def test_a_copy_of_one_module_does_not_offload(disk):
    model = Stack()
    torchoffload.offload_modules(model, "layers.*", **disk)
    model.layers[0] = copy.deepcopy(model.layers[0])
    torchoffload.reset_stats()
    model(batch()).backward()
    assert torchoffload.stats().bytes_offloaded == 2 * Layer.SAVED_BYTES


def test_a_saved_state_does_not_know_of_the_hooks(disk):
    model = Stack()
    keys = list(model.state_dict())
    torchoffload.offload_modules(model, "layers.*", **disk)
    assert list(model.state_dict()) == keys
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    model.load_state_dict(torch.load(buffer))


def test_two_threads_call_one_model(device_under_test: Device):
    def program(run: Run):
        model = run.module(Stack)
        inputs = [run.leaf(TOKENS, WIDTH) for _ in range(2)]
        offload(run, device_under_test, model, "layers.*")
        losses: list[torch.Tensor | None] = [None, None]
        turn = threading.Barrier(2)

        def forward(index: int) -> None:
            turn.wait(30)
            losses[index] = model(inputs[index])

        threads = [threading.Thread(target=forward, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        gradients = [
            torch.autograd.grad(loss, (x, *model.parameters())) for loss, x in zip(losses, inputs, strict=True)
        ]
        return losses, gradients

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=2 * Stack.SAVED_BYTES)
    assert len(stats.tapes) == 2


@pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded")
def test_layers_of_one_model_on_two_devices(device_under_test: Device):
    """As under device_map: each layer has its device, and what is saved there moves from there and back."""

    class Spread(Stack):
        def forward(self, x):
            for device, layer in enumerate(self.layers):
                with self.simulation.device(device % 2):
                    x = layer(x * 1.0)
            return x.sum()

    torchoffload.reset_stats()
    results = []
    for chosen in (False, True):
        with device_under_test.scope(devices=2) as simulation:
            torch.manual_seed(5)
            model = Spread()
            model.simulation = simulation
            if chosen:
                torchoffload.offload_modules(model, "layers.*", **options(device_under_test))
            x = torch.randn(TOKENS, WIDTH, requires_grad=True)
            current = simulation.current_stream()
            model(x).backward()
            assert simulation.current_stream() == current
            results.append([x.grad.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
            del model
            gc.collect()
    for stock, offloaded in zip(*results, strict=True):
        assert torch.equal(stock, offloaded)
    stats = torchoffload.stats()
    assert stats.bytes_offloaded == Stack.SAVED_BYTES
    assert len(stats.tapes) == 2


@pytest.mark.cuda
@pytest.mark.two_gpus
def test_layers_of_one_model_on_two_gpus(tmp_path):
    class Spread(Stack):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x.to(layer.mlp.up.weight.device))
            return x.sum()

    def run(chosen: bool):
        torch.manual_seed(5)
        model = Spread()
        for index, layer in enumerate(model.layers):
            layer.to(f"cuda:{index % 2}")
        if chosen:
            torchoffload.offload_modules(
                model, "layers.*", min_offload_size=0, offload_window_bytes=0, reload_window_bytes=0, learn=False
            )
        x = torch.randn(TOKENS, WIDTH).cuda(0).requires_grad_()
        device = torch.cuda.current_device()
        model(x).backward()
        assert torch.cuda.current_device() == device
        return [x.grad.cpu(), *(p.grad.cpu() for p in model.layers.parameters())]

    expected = run(chosen=False)
    torchoffload.reset_stats()
    for stock, offloaded in zip(expected, run(chosen=True), strict=True):
        assert torch.equal(stock, offloaded)
    assert torchoffload.stats().bytes_offloaded >= Stack.SAVED_BYTES - INPUT_BYTES
