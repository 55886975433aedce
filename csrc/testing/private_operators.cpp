// The operators of the simulated devices that PyTorch knows as "privateuseone": memory, views and copies of their own,
// and the CPU's for everything else.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Tensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "testing/private_device.h"

namespace torchoffload {

namespace {

// Inside an operator that runs on the CPU: copies to it and from it are the operator's own accesses, on its stream, and
// the host does not wait for them.
thread_local int operator_depth = 0;

struct InsideOperator {
  InsideOperator() { ++operator_depth; }
  ~InsideOperator() { --operator_depth; }
  InsideOperator(const InsideOperator&) = delete;
  InsideOperator& operator=(const InsideOperator&) = delete;
};

bool is_private(const at::Tensor& tensor) { return tensor.device().type() == c10::DeviceType::PrivateUse1; }

StreamId current_stream_of(const at::Tensor& tensor) { return private_world().current_stream(tensor.device().index()); }

// The bytes from the tensor's first element to its last.
Span reach_of(const at::Tensor& tensor) {
  const auto begin = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return {begin, begin};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {begin, begin + (static_cast<uint64_t>(last) + 1) * tensor.itemsize()};
}

void note_access(const at::Tensor& tensor, bool writes) {
  const Span span = reach_of(tensor);
  if (!is_private(tensor) || span.nbytes() == 0) return;
  private_world().saw_operator(writes, reinterpret_cast<const void*>(span.begin), span.nbytes(),
                               current_stream_of(tensor));
}

// The same bytes as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!is_private(tensor)) return tensor;
  at::Tensor same = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                                  tensor.options().device(at::kCPU).requires_grad(false));
  same._set_conj(tensor.is_conj());
  same._set_neg(tensor.is_neg());
  return same;
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool>,
                 std::optional<c10::MemoryFormat> memory_format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "the simulated device has strided tensors only");
  const c10::DeviceGuard on_device(c10::device_or_default(device));
  return at::detail::empty_generic(sizes, c10::GetAllocator(c10::DeviceType::PrivateUse1),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   memory_format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool>) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "the simulated device has strided tensors only");
  const c10::DeviceGuard on_device(c10::device_or_default(device));
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(c10::DeviceType::PrivateUse1),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// Between the device and page-locked memory, of the same bytes on both sides: as a device's copy engine takes them.
bool can_be_enqueued(const at::Tensor& source, const at::Tensor& target) {
  const at::Tensor& host = is_private(source) ? target : source;
  return is_private(source) != is_private(target) && source.sizes() == target.sizes() &&
         source.scalar_type() == target.scalar_type() && source.is_contiguous() && target.is_contiguous() &&
         source.is_conj() == target.is_conj() && source.is_neg() == target.is_neg() && source.numel() > 0 &&
         at::globalContext()
             .getAcceleratorHooksInterface(c10::DeviceType::PrivateUse1)
             .isPinnedPtr(host.const_data_ptr());
}

void enqueue(const at::Tensor& source, const at::Tensor& target) {
  const bool is_out = is_private(source);
  const StreamId stream = current_stream_of(is_out ? source : target);
  auto* const to = static_cast<std::byte*>(const_cast<void*>(target.const_data_ptr()));
  const auto* const from = static_cast<const std::byte*>(source.const_data_ptr());
  if (is_out) {
    private_world().copy_out(to, from, source.nbytes(), stream);
  } else {
    private_world().copy_in(to, from, source.nbytes(), stream);
  }
  const int index = (is_out ? source : target).device().index();
  const at::Tensor& host = is_out ? target : source;
  at::getHostAllocator(c10::DeviceType::PrivateUse1)
      ->record_event(const_cast<void*>(host.const_data_ptr()), host.storage().data_ptr().get_context(),
                     torch_stream_of(stream, index));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const c10::DeviceGuard on_device(is_private(target) ? target.device() : source.device());
  if (non_blocking && operator_depth == 0 && can_be_enqueued(source, target)) {
    enqueue(source, target);
    return target;
  }
  note_access(source, /*writes=*/false);
  note_access(target, /*writes=*/true);
  on_cpu(target).copy_(on_cpu(source));
  const bool host_waits = operator_depth == 0 && is_private(source) != is_private(target);
  if (host_waits)
    private_world().synchronize(private_world().record(current_stream_of(is_private(source) ? source : target)));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, /*non_blocking=*/false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  note_access(tensor, /*writes=*/false);
  private_world().synchronize(private_world().record(current_stream_of(tensor)));
  return at::native::_local_scalar_dense_cpu(on_cpu(tensor));
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef sizes) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> plain_offset;
  if (offset) plain_offset = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                           plain_offset);
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef sizes,
                         std::optional<c10::MemoryFormat> memory_format) {
  const c10::DeviceGuard on_device(tensor.device());
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(sizes), memory_format);
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) { return at::native::set_tensor_(tensor, source); }

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source) { return at::native::set_(tensor, source); }

at::Tensor& set_storage_and_view(at::Tensor& tensor, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes,
                                 c10::SymIntArrayRef strides) {
  return at::native::set_storage_cpu_(tensor, source, offset.guard_int(__FILE__, __LINE__),
                                      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

// PyTorch asks for these two by name on devices that are neither the CPU's nor CUDA's.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  const InsideOperator inside;
  std::optional<at::Tensor> cpu_bias;
  if (bias && bias->defined()) cpu_bias = bias->cpu();
  return at::convolution(input.cpu(), weight.cpu(), cpu_bias, stride, padding, dilation, transposed, output_padding,
                         groups)
      .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& gradient, const at::Tensor& input,
                                                                    const at::Tensor& weight, c10::IntArrayRef stride,
                                                                    c10::IntArrayRef padding, c10::IntArrayRef dilation,
                                                                    bool transposed, c10::IntArrayRef output_padding,
                                                                    int64_t groups, std::array<bool, 3> wanted) {
  const InsideOperator inside;
  const std::vector<int64_t> bias_sizes{gradient.size(1)};
  auto [of_input, of_weight, of_bias] =
      at::convolution_backward(gradient.cpu(), input.cpu(), weight.cpu(), bias_sizes, stride, padding, dilation,
                               transposed, output_padding, groups, wanted);
  const auto back = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(input.device()) : tensor; };
  return {back(of_input), back(of_weight), back(of_bias)};
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const InsideOperator inside;
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

// A copy resolves such views itself. The fallbacks of these keys would clone them, which takes a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
  library.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
  library.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("resize_", &resize);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage_and_view);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("record_stream", &record_stream);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

}  // namespace

}  // namespace torchoffload
