#include "autograd/absent_tensor.h"

#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Layout.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/TensorOptions.h>

#include <utility>

namespace torchoffload {

namespace {

constexpr const char* kNoData =
    "torchoffload: a value is asked for that the recomputation of a block left out, because no operator of the forward "
    "read it when the plan was made. Either it is read past PyTorch's dispatcher, by a kernel that is launched with "
    "data_ptr() or through .data: register such a kernel with torch.library.custom_op. Or it was made of a buffer that "
    "has changed since, in a forward that did otherwise than planned: mark the block with recompute=False";

// Before torch 2.13 StorageImpl can be told to refuse access to its data, and not to allow it again. An explicit
// instantiation may name a private member, so the flag is reached without a cast.
bool& refuses_access(c10::StorageImpl& storage);

template <bool c10::StorageImpl::* Flag>
struct FlagOfStorage {
  friend bool& refuses_access(c10::StorageImpl& storage) { return storage.*Flag; }
};
template struct FlagOfStorage<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

at::Tensor make_absent(const AbsentLayout& layout) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(layout.nbytes),
                       c10::DataPtr(nullptr, layout.device), c10::GetAllocator(layout.device.type()),
                       /*resizable=*/true);
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(kNoData);
  const c10::DispatchKey key = c10::computeDispatchKey(layout.dtype, c10::kStrided, layout.device);
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                   c10::scalarTypeToTypeMeta(layout.dtype));
  impl->set_sizes_and_strides(layout.sizes, layout.strides, layout.storage_offset);
  return at::Tensor(std::move(impl));
}

void give_memory(const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (!refuses_access(storage)) return;
  const c10::DeviceGuard guard(tensor.device());
  c10::DataPtr data = storage.allocator()->allocate(storage.nbytes());
  refuses_access(storage) = false;
  storage.set_data_ptr_noswap(std::move(data));
}

}  // namespace torchoffload
