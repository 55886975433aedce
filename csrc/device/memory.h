// Memory: a share in the memory of a PyTorch storage, for floors that are compiled without PyTorch's headers.
// Ownership:     MemoryRef borrows the memory. Memory shares it, as a tensor does. WeakMemory shares nothing: the bytes
//                may be freed, but the address of the storage is given to no other storage meanwhile.
// Thread safety: shares may be taken and dropped on any thread. A MemorySet needs the GIL. Dropping a share may run
//                Python code, unless the thread puts the drop off; see PutOffDrops.
// Not handled:   resizing. The program may resize a storage at any time: data() and nbytes() give the present values.
//
// The functions declared here are defined in torch_memory.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace c10 {
struct StorageImpl;
}

namespace torchoffload {

// Shares whose drop a thread has put off. Dropping the last share of a storage frees the memory and the storage's
// Python object, and so may run finalizers and deleters, which may be any code. While such a list is in force on a
// thread, each share that the thread drops, strong or weak, goes onto the list instead.
class PutOffDrops {
 public:
  bool is_empty() const { return shares_.empty() && weak_shares_.empty(); }
  // Drops the shares that are on the list by now. May run Python code, which may add to the list meanwhile.
  void drop();
  // Drops nothing, ever.
  void leak();

  // From here on, shares that the calling thread drops go onto `drops`; null: they are dropped at once. Returns the
  // list that was in force before.
  static PutOffDrops* put_in_force(PutOffDrops* drops);

 private:
  friend class Memory;
  friend class WeakMemory;

  std::vector<c10::StorageImpl*> shares_;
  std::vector<c10::StorageImpl*> weak_shares_;
};

class MemoryRef {
 public:
  MemoryRef() = default;
  explicit MemoryRef(c10::StorageImpl* storage) : storage_(storage) {}

  explicit operator bool() const { return storage_ != nullptr; }
  const std::byte* data() const;
  uint64_t nbytes() const;
  // The storage that the memory belongs to. Its address names the memory while a Memory or WeakMemory of it exists.
  c10::StorageImpl* storage() const { return storage_; }

  friend bool operator==(const MemoryRef&, const MemoryRef&) = default;

 private:
  c10::StorageImpl* storage_ = nullptr;
};

class Memory {
 public:
  Memory() = default;
  explicit Memory(MemoryRef memory) : memory_(memory) {  // takes a share of its own
    if (memory_) share();
  }
  Memory(const Memory& other) : Memory(other.memory_) {}
  Memory(Memory&& other) noexcept : memory_(std::exchange(other.memory_, {})) {}
  Memory& operator=(Memory other) noexcept {
    std::swap(memory_, other.memory_);
    return *this;
  }
  ~Memory() {
    if (memory_) drop();
  }

  // Takes over the caller's share in `storage`.
  static Memory of_share(c10::StorageImpl* storage) {
    Memory memory;
    memory.memory_ = MemoryRef(storage);
    return memory;
  }
  // Hands the share over to the caller. If the caller drops the pointer, the memory is leaked.
  c10::StorageImpl* release() { return std::exchange(memory_, {}).storage(); }

  explicit operator bool() const { return static_cast<bool>(memory_); }
  MemoryRef ref() const { return memory_; }
  const std::byte* data() const { return memory_.data(); }
  // For memory that no other owner shares yet.
  std::byte* mutable_data() const { return const_cast<std::byte*>(memory_.data()); }
  uint64_t nbytes() const { return memory_.nbytes(); }

 private:
  void share();
  void drop();

  MemoryRef memory_;
};

class WeakMemory {
 public:
  WeakMemory() = default;
  explicit WeakMemory(MemoryRef memory);
  WeakMemory(const WeakMemory& other);
  WeakMemory(WeakMemory&& other) noexcept : storage_(std::exchange(other.storage_, nullptr)) {}
  WeakMemory& operator=(WeakMemory other) noexcept {
    std::swap(storage_, other.storage_);
    return *this;
  }
  ~WeakMemory() {
    if (storage_ != nullptr) drop();
  }

  explicit operator bool() const { return storage_ != nullptr; }
  const c10::StorageImpl* storage() const { return storage_; }
  size_t share_count() const;  // 0: the memory is gone
  Memory lock() const;         // empty if the memory is gone

 private:
  void drop();

  c10::StorageImpl* storage_ = nullptr;
};

// A set of storages, which it holds weakly. A storage is in it from insert() on, for as long as it lives.
class MemorySet {
 public:
  MemorySet();
  MemorySet& operator=(MemorySet&& other) noexcept;
  ~MemorySet();

  void insert(MemoryRef memory) {
    if (!contains(memory.storage())) add(WeakMemory(memory));
  }
  void insert(const WeakMemory& memory) {
    if (!contains(memory.storage())) add(memory);
  }
  bool contains(const c10::StorageImpl* storage) const;

 private:
  void add(WeakMemory memory);

  struct Entries;
  std::unique_ptr<Entries> entries_;
};

}  // namespace torchoffload
