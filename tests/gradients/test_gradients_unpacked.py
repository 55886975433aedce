"""What unpack hands out behaves as what autograd would have kept: read twice or late, written into, kept for ever."""

import gc
import weakref

import pytest
import torch

from devices import Device
from functions import KeepsUnpacked, ReadTwice, ReturnsView, Save, WritesIntoUnpacked
from gradients import Run, assert_same_gradients


def test_backward_reads_its_saved_tensors_twice(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = ReadTwice.apply(x.exp())
        y.sum().backward(retain_graph=True)
        run.check(first=x.grad)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096)


@pytest.mark.parametrize("where", ["inside", "after"])
def test_saved_tensors_are_read_outside_backward(device_under_test: Device, where: str):
    def program(run: Run):
        x = run.leaf(32, 32)

        def read():
            run.check(saved=y.grad_fn._saved_self, result=z.grad_fn._saved_result)

        with run.offload():
            a = x.exp()
            y = a.sin()
            z = y.exp()
            if where == "inside":
                read()  # copies may not even have begun
                z = z.tanh().exp()
        read()
        for _ in range(3):
            with run.offload():
                other = x.exp().sin()
            other.sum().backward()
        read()
        z.sum().backward()
        run.check(gradient=x.grad)
        with run.raising("freed"):
            _ = y.grad_fn._saved_self

    # The results of exp and exp (and of tanh and exp), and 3 x exp: sin saves the result of the first exp.
    moved_bytes = 4096 * (5 if where == "after" else 7)
    assert_same_gradients(program, device=device_under_test, moved_bytes=moved_bytes)


def test_the_reads_of_one_record_share_a_storage(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            a = x.exp()
            y, z = a.sin(), a.t().cos()
        first, again, other = y.grad_fn._saved_self, y.grad_fn._saved_self, z.grad_fn._saved_self
        run.check(same=first.untyped_storage().data_ptr() == again.untyped_storage().data_ptr())
        run.check(shared=first.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())
        (y + z).sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096)


def test_a_saved_tensor_read_early_and_kept_changes_nothing(device_under_test: Device):
    def program(run: Run):
        x, kept = run.leaf(32, 32), []
        for _ in range(3):
            with run.offload():
                y = x.exp().sin()
            kept.append(y.grad_fn._saved_self)
            y.sum().backward()
        run.check(kept=kept)
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * 4096)


def test_backward_returns_a_view_of_what_it_unpacked(device_under_test: Device):
    def program(run: Run):
        x, y = run.leaf(32, 32), run.leaf(32, 32)
        for _ in range(2):
            with run.offload():
                z = ReturnsView.apply(x * 2, y * 3)
            z.sum().backward()
            run.check(gradients=(x.grad, y.grad))
        # A gradient may now be the very memory that unpack handed out; more steps must not write over it.
        with run.offload():
            other = (x.detach().requires_grad_() * 5).exp().sin()
        other.sum().backward()
        return x.grad, y.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 2 * 4096 + 4096)


def test_a_returned_view_becomes_the_gradient_and_is_accumulated_into(device_under_test: Device):
    def program(run: Run):
        x, y = run.leaf(32, 32), run.leaf(32, 32)
        with run.offload():
            a, b = x.clone(), y.clone()
            z = ReturnsView.apply(a, b)
            w = a.exp() * b.sin()
        z.sum().backward(inputs=[x, y])
        run.check(first=(x.grad, y.grad))
        w.sum().backward(inputs=[x, y])
        return x.grad, y.grad

    assert_same_gradients(program, device=device_under_test)


def test_backward_writes_into_what_it_unpacked(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = WritesIntoUnpacked.apply(x * 2)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096)


def test_writing_into_what_was_unpacked_fails_the_next_unpack(device_under_test: Device):
    """Autograd's own error, in both: the second backward would read what the first wrote."""

    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = WritesIntoUnpacked.apply(x * 2)
        y.sum().backward(retain_graph=True)
        run.check(first=x.grad)
        with run.raising("second"):
            y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096)


@pytest.mark.parametrize("retained", [True, False])
def test_writing_into_what_was_unpacked_fails_other_nodes_that_saved_it(device_under_test: Device, retained: bool):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            a = x * 2
            y = a.sin()
            z = WritesIntoUnpacked.apply(a)  # its node runs first, and writes
        with run.raising("backward"):
            (y + z).sum().backward(retain_graph=retained)
        with run.raising("read"):
            run.check(saved=y.grad_fn._saved_self)

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096)


def test_writing_into_a_saved_tensor_read_outside_backward(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = x.exp().sin()
        saved = y.grad_fn._saved_self
        with torch.no_grad():
            saved.zero_()
        with run.raising("backward"):
            y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096)


def test_backward_keeps_what_it_unpacked_for_ever(device_under_test: Device):
    def program(run: Run):
        x, kept = run.leaf(32, 32), []
        for step in range(4):
            with run.offload():
                y = KeepsUnpacked.apply(x * (step + 1), kept)
            y.sum().backward()
        run.check(kept=kept)
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4 * 4096)


def test_what_is_kept_for_ever_outlives_the_graph_and_its_record(device_under_test: Device):
    def program(run: Run):
        x, kept = run.leaf(32, 32), []
        with run.offload():
            y = KeepsUnpacked.apply(x * 3, kept)
            z = Save.apply(y, lambda *unpacked: kept.extend(unpacked), x.detach().t() * 2, x.detach() * 5)
        z.sum().backward()
        del y, z
        gc.collect()
        for _ in range(4):  # others' bytes go through the same slots and the same device memory
            with run.offload():
                y = x.exp().exp().exp()
            y.sum().backward()
        return kept, x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * 4096 + 4 * 3 * 4096)


def test_saved_outputs_and_inputs_have_their_own_history(device_under_test: Device):
    """Through what was unpacked under create_graph, the graph goes on to the leaves."""

    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            a = x * x
            y = ReadTwice.apply(a).exp()
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        run.check(requires=gradient.requires_grad, saved=y.grad_fn._saved_result.requires_grad)
        gradient.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_the_source_is_freed_while_its_record_rests(device_under_test: Device):
    """With an offload window of 0 nothing but the record's slot is left of an intermediate."""

    def program(run: Run):
        x = run.leaf(64, 64)
        with run.offload(offload_window_bytes=0):
            a = x.exp()
            alive = weakref.ref(a)
            y = a.sin().exp()
            del a
        gc.collect()
        assert run.stock or alive() is None, "the tensor object itself is never held"
        y.sum().backward()
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 64 * 64 * 4)
    assert stats.bytes_reloaded == stats.bytes_offloaded


def test_anomaly_mode(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with torch.autograd.detect_anomaly(check_nan=False):
            with run.offload():
                y, z = x.exp().sin(), x.exp().cos()
            y.sum().backward()
            with torch.no_grad():
                z.grad_fn._saved_self.zero_()
            with run.raising("written"):
                z.sum().backward()
        return x.grad

    with pytest.warns(UserWarning, match="Anomaly|Error detected"):
        assert_same_gradients(program, device=device_under_test)


# ---- a gradient that is a saved tensor ----


class GradientIsSaved(torch.autograd.Function):
    """Its gradient is what it unpacked, with no arithmetic in between."""

    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved)
        return (x * saved).sum()

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        return saved, None


@pytest.mark.parametrize("retain", [False, True], ids=["once", "retained"])
@pytest.mark.parametrize("made", ["input", "result"])
@pytest.mark.parametrize("minimum", [0, 1 << 20], ids=["moved", "kept"])
def test_a_gradient_that_was_saved_is_nobody_elses(device_under_test: Device, minimum: int, made: str, retain: bool):
    """Autograd takes a gradient that nobody else holds for a leaf's .grad, which is then written to."""

    def program(run: Run):
        first, second, x = run.leaf(32, 32), run.leaf(32, 32), run.leaf(32, 32)
        saved = x.sin() if made == "result" else run.tensor(32, 32)
        with run.offload(min_offload_size=minimum):
            y = GradientIsSaved.apply(first, saved) + GradientIsSaved.apply(second, saved)
        for _ in range(3 if retain else 1):
            y.backward(retain_graph=retain)
            first.grad.mul_(2)
        run.check(saved=saved)
        return first.grad, second.grad

    moves = {"moved_bytes": 4096} if minimum == 0 else {"moved_bytes": 0, "kept_reason": "small"}
    assert_same_gradients(program, device=device_under_test, **moves)


def test_a_gradient_that_was_saved_is_not_added_into(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            h = x * 2
            y = h.sum() + GradientIsSaved.apply(h, h.detach() * 3)
        for _ in range(3):
            y.backward(retain_graph=True)
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096)


def test_saved_tensors_are_read_in_inference_mode(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = x.exp().sin()
        with torch.inference_mode():
            saved = y.grad_fn._saved_self
            run.check(saved=saved, is_inference=saved.is_inference())
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096)
