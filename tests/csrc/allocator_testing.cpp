// Allocators of the CPU's memory. One counts what is allocated, for tests that take the CPU for a device of a given size:
// it sees what operators allocate whoever calls them, also those that no mode is shown. The other one gives memory again.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace py = pybind11;

namespace torchoffload {

namespace {

constexpr double kAllocationS = 10e-6;
constexpr double kBytesPerS = 1e9;

// What is counted of one device. Guarded by the allocator's mutex.
struct CountedMemory {
  double growth = 1;         // what is reserved, over what is allocated
  uint64_t cap_bytes = 0;    // what may be reserved
  uint64_t ooms = 0;         // allocations that were refused
  uint64_t fixed_bytes = 0;  // what was there before
  uint64_t made_bytes = 0;   // what is there beside
  uint64_t peak_bytes = 0;
  uint64_t reserved_bytes = 0, most_reserved_bytes = 0;
  double now_s = 0;  // goes on with allocations alone
};

// Takes the place of the CPU's allocator, and has its memory from there.
class SubstituteAllocator : public c10::Allocator {
 public:
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }

 protected:
  void install() {
    former_ = c10::GetCPUAllocator();
    deleter_ = former_->raw_deleter();
    c10::SetCPUAllocator(this, UINT8_MAX);
  }
  void uninstall() { c10::SetCPUAllocator(former_, UINT8_MAX); }

  void* allocate_formerly(size_t nbytes) {
    c10::DataPtr made = former_->allocate(nbytes);
    TORCH_CHECK(made.get_context() == made.get(), "the CPU's allocator has contexts of its own");
    return made.release_context();
  }
  void free_formerly(void* address) { deleter_(address); }

  std::mutex mutex_;

 private:
  c10::Allocator* former_ = nullptr;
  c10::DeleterFnPtr deleter_ = nullptr;
};

class CountingAllocator final : public SubstituteAllocator {
 public:
  static CountingAllocator& instance() {
    static auto* const leaked = new CountingAllocator;  // storages hold a pointer to it
    return *leaked;
  }

  c10::DataPtr allocate(size_t nbytes) override {
    count(nbytes);
    void* const address = allocate_formerly(nbytes);
    if (address != nullptr) {
      const std::lock_guard lock(mutex_);
      sizes_[address] = {nbytes, memory_};
    }
    return {address, address, &free_counted, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }

  void begin(std::shared_ptr<CountedMemory> memory) {
    TORCH_CHECK(memory_ == nullptr, "the CPU's memory is counted already");
    memory_ = std::move(memory);
    install();
  }
  void end() {
    uninstall();
    const std::lock_guard lock(mutex_);
    memory_ = nullptr;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  void count(uint64_t nbytes) {
    const std::lock_guard lock(mutex_);
    if (memory_ == nullptr) return;
    CountedMemory& memory = *memory_;
    const uint64_t allocated = memory.fixed_bytes + memory.made_bytes + nbytes;
    const auto reserved = static_cast<uint64_t>(static_cast<double>(allocated) * memory.growth);
    if (reserved > memory.cap_bytes) {
      ++memory.ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory.");
    }
    memory.now_s += kAllocationS + static_cast<double>(nbytes) / kBytesPerS;
    memory.made_bytes += nbytes;
    memory.peak_bytes = std::max(memory.peak_bytes, allocated);
    memory.reserved_bytes = std::max(memory.reserved_bytes, reserved);
    memory.most_reserved_bytes = std::max(memory.most_reserved_bytes, memory.reserved_bytes);
  }

  static void free_counted(void* address) {
    CountingAllocator& self = instance();
    {
      const std::lock_guard lock(self.mutex_);
      if (const auto found = self.sizes_.find(address); found != self.sizes_.end()) {
        const auto& [nbytes, memory] = found->second;
        if (memory != nullptr) memory->made_bytes -= nbytes;
        self.sizes_.erase(found);
      }
    }
    self.free_formerly(address);
  }

  std::unordered_map<void*, std::pair<uint64_t, std::shared_ptr<CountedMemory>>> sizes_;
  std::shared_ptr<CountedMemory> memory_;  // what is counted now; null: nothing is
};

// Gives the memory that was freed last for the next allocation of as many bytes, as a device's allocator does.
class RecyclingAllocator final : public SubstituteAllocator {
 public:
  static RecyclingAllocator& instance() {
    static auto* const leaked = new RecyclingAllocator;  // storages hold a pointer to it
    return *leaked;
  }

  c10::DataPtr allocate(size_t nbytes) override {
    const std::lock_guard lock(mutex_);
    void* address = nullptr;
    if (std::vector<void*>& freed = freed_[nbytes]; !freed.empty()) {
      address = freed.back();
      freed.pop_back();
    } else {
      address = allocate_formerly(nbytes);
      if (address != nullptr) sizes_[address] = nbytes;
    }
    return {address, address, &free_recycled, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_recycled; }

  void begin() {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!recycles_, "the CPU's memory is recycled already");
    recycles_ = true;
    install();
  }
  void end() {
    const std::lock_guard lock(mutex_);
    recycles_ = false;
    uninstall();
    for (const auto& [nbytes, freed] : freed_) {
      for (void* const address : freed) release(address);
    }
    freed_.clear();
  }

 private:
  void release(void* address) {
    sizes_.erase(address);
    free_formerly(address);
  }
  static void free_recycled(void* address) {
    RecyclingAllocator& self = instance();
    const std::lock_guard lock(self.mutex_);
    if (self.recycles_) {
      self.freed_[self.sizes_.at(address)].push_back(address);
    } else {
      self.release(address);
    }
  }

  bool recycles_ = false;
  std::unordered_map<void*, size_t> sizes_;               // of all memory that is held
  std::unordered_map<size_t, std::vector<void*>> freed_;  // by its size, the latest last
};

template <typename Value>
void bind_field(py::class_<CountedMemory, std::shared_ptr<CountedMemory>>& bound, const char* name,
                Value CountedMemory::* field) {
  bound.def_property(
      name,
      [field](const CountedMemory& self) {
        const std::lock_guard lock(CountingAllocator::instance().mutex());
        return self.*field;
      },
      [field](CountedMemory& self, Value value) {
        const std::lock_guard lock(CountingAllocator::instance().mutex());
        self.*field = value;
      });
}

}  // namespace

void bind_allocator_testing(py::module_& module) {
  py::class_<CountedMemory, std::shared_ptr<CountedMemory>> bound(module, "CountedMemory");
  bound.def(py::init<>())
      .def("begin", [](std::shared_ptr<CountedMemory> self) { CountingAllocator::instance().begin(std::move(self)); })
      .def("end", [](const CountedMemory&) { CountingAllocator::instance().end(); });
  bind_field(bound, "growth", &CountedMemory::growth);
  bind_field(bound, "cap_bytes", &CountedMemory::cap_bytes);
  bind_field(bound, "ooms", &CountedMemory::ooms);
  bind_field(bound, "fixed_bytes", &CountedMemory::fixed_bytes);
  bind_field(bound, "made_bytes", &CountedMemory::made_bytes);
  bind_field(bound, "peak_bytes", &CountedMemory::peak_bytes);
  bind_field(bound, "reserved_bytes", &CountedMemory::reserved_bytes);
  bind_field(bound, "most_reserved_bytes", &CountedMemory::most_reserved_bytes);
  bind_field(bound, "now_s", &CountedMemory::now_s);
  module.def("begin_recycling", [] { RecyclingAllocator::instance().begin(); });
  module.def("end_recycling", [] { RecyclingAllocator::instance().end(); });
}

}  // namespace torchoffload
