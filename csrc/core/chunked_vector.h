// ChunkedVector: a sequence that grows at its end and never moves its elements.
// Ownership:     its elements, which are destroyed with it.
// Thread safety: none of its own.
// Failures:      growing throws std::bad_alloc and leaves the sequence as it was.
//
// A reference to an element stays valid while others are added. Finding an element by its index takes a shift and a
// mask. std::deque would divide by the number of elements in a node, and if T is large, its nodes have one element.
#pragma once

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <vector>

namespace torchoffload {

template <typename T>
class ChunkedVector {
 public:
  size_t size() const { return size_; }

  T& operator[](size_t index) { return chunks_[index / kChunk][index % kChunk]; }
  const T& operator[](size_t index) const { return chunks_[index / kChunk][index % kChunk]; }

  // Throws std::out_of_range if there is no such element.
  T& at(size_t index) { return index < size_ ? (*this)[index] : throw std::out_of_range("ChunkedVector::at"); }
  const T& at(size_t index) const {
    return index < size_ ? (*this)[index] : throw std::out_of_range("ChunkedVector::at");
  }

  template <typename Vector>
  struct Iterator {
    Vector* vector;
    size_t index;

    decltype(auto) operator*() const { return (*vector)[index]; }
    Iterator& operator++() { return ++index, *this; }
    bool operator==(const Iterator& other) const { return index == other.index; }
  };
  auto begin() { return Iterator<ChunkedVector>{this, 0}; }
  auto end() { return Iterator<ChunkedVector>{this, size_}; }
  auto begin() const { return Iterator<const ChunkedVector>{this, 0}; }
  auto end() const { return Iterator<const ChunkedVector>{this, size_}; }

  // Adds default-constructed elements until there are `size` of them. A smaller `size` changes nothing.
  void grow_to(size_t size) {
    while (chunks_.size() * kChunk < size) chunks_.push_back(std::make_unique<T[]>(kChunk));
    if (size > size_) size_ = size;
  }

 private:
  static constexpr size_t kChunk = 64;

  std::vector<std::unique_ptr<T[]>> chunks_;
  size_t size_ = 0;
};

}  // namespace torchoffload
