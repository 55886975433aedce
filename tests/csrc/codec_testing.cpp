// The lossless codes, driven from Python: the reference for the host, and the kernels for a GPU, which are compiled
// for the host here and run lane by lane.
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "device/codec/codes.h"
#include "device/codec/kernel_source.h"

namespace py = pybind11;

namespace torchoffload {

namespace host_kernels {

// What kernels.def is written in: see kernel_source.cpp for the same on a GPU.
using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
#define INLINE inline
#define KERNEL void

template <typename T>
struct PerLane {
  T values[32];
  T& operator[](u32 lane) { return values[lane]; }
};

struct Warp {
  u64 index = 0;
  u64 count = 1;
};
Warp this_warp;  // needs the GIL

inline u32 first_lane() { return 0; }
inline u32 end_lane() { return 32; }
inline u64 warp_index() { return this_warp.index; }
inline u64 warp_count() { return this_warp.count; }
inline u32 warp_max(const PerLane<u32>& of) { return *std::max_element(of.values, of.values + 32); }
inline bool warp_any(const PerLane<bool>& of) { return std::count(of.values, of.values + 32, true) > 0; }

inline u32 load4(const u8* from) {
  if (reinterpret_cast<uintptr_t>(from) % 4 != 0) throw std::logic_error("a load of 4 bytes is not aligned");
  u32 word = 0;
  std::memcpy(&word, from, sizeof(word));
  return word;
}
inline void store4(u8* to, u32 word) {
  if (reinterpret_cast<uintptr_t>(to) % 4 != 0) throw std::logic_error("a store of 4 bytes is not aligned");
  std::memcpy(to, &word, sizeof(word));
}
inline void store8(u8* to, u32 low, u32 high) {
  if (reinterpret_cast<uintptr_t>(to) % 8 != 0) throw std::logic_error("a store of 8 bytes is not aligned");
  store4(to, low);
  store4(to + 4, high);
}
inline void load16(const u8* from, u32* words) { std::memcpy(words, from, 16); }
inline void store16(u8* to, const u32* words) { std::memcpy(to, words, 16); }

#define TORCHOFFLOAD_KERNELS(...) __VA_ARGS__
#include "device/codec/kernels.def"
#undef TORCHOFFLOAD_KERNELS
#undef INLINE
#undef KERNEL

}  // namespace host_kernels

namespace {

using codec::Code;
using codec::PieceLayout;

template <typename Kernel>
void for_each_warp(uint64_t count, Kernel kernel) {
  for (uint64_t index = 0; index < count; ++index) {
    host_kernels::this_warp = {index, count};
    kernel();
  }
}

// Memory that begins `modulo` bytes behind a multiple of 512, with bytes around it that nobody may write.
class Guarded {
 public:
  Guarded(uint64_t nbytes, uint64_t modulo) : nbytes_(nbytes), all_(kAround + 512 + modulo + nbytes + kAround, kFill) {
    const auto address = reinterpret_cast<uintptr_t>(all_.data()) + kAround;
    begin_ = kAround + round_up(address, 512) - address + modulo;
  }
  Guarded(const std::string& bytes, uint64_t modulo) : Guarded(bytes.size(), modulo) {
    std::memcpy(data(), bytes.data(), bytes.size());
  }

  std::byte* data() { return reinterpret_cast<std::byte*>(all_.data()) + begin_; }
  unsigned char* bytes() { return all_.data() + begin_; }
  py::bytes content() { return {reinterpret_cast<const char*>(bytes()), nbytes_}; }
  void check() const {
    const auto is_filled = [](unsigned char byte) { return byte == kFill; };
    const auto first = all_.begin() + static_cast<ptrdiff_t>(begin_);
    const auto last = first + static_cast<ptrdiff_t>(nbytes_);
    if (!std::all_of(all_.begin(), first, is_filled) || !std::all_of(last, all_.end(), is_filled))
      throw std::logic_error("bytes outside of the range were written");
  }

 private:
  static constexpr uint64_t kAround = 64;
  static constexpr unsigned char kFill = 0xa5;

  uint64_t nbytes_;
  std::vector<unsigned char> all_;
  uint64_t begin_ = 0;
};

// (coded, overflow); `warp_count` 0: by the reference.
std::tuple<py::bytes, py::bytes> encode(Code code, const std::string& raw, uint64_t modulo, uint64_t tag,
                                        uint64_t warp_count) {
  const PieceLayout layout = PieceLayout::of(code, raw.size());
  Guarded source(raw, modulo);
  Guarded coded(layout.nbytes, 0);
  Guarded overflow(codec::overflow_bytes(code, raw.size()), 0);
  if (warp_count == 0) codec::encode(code, source.data(), raw.size(), coded.data(), overflow.data(), tag);
  for_each_warp(warp_count, [&] {
    const auto kernel =
        code == Code::Bfloat16 ? host_kernels::torchoffload_encode_bfloat16 : host_kernels::torchoffload_encode_widened;
    kernel(source.bytes(), raw.size(), coded.bytes(), overflow.bytes(), tag, layout.tag_begin);
  });
  for (const Guarded* const memory : {&source, &coded, &overflow}) memory->check();
  return {coded.content(), overflow.content()};
}

py::bytes decode(Code code, const std::string& coded, const std::string& overflow, uint64_t raw_bytes, uint64_t modulo,
                 uint64_t warp_count) {
  Guarded target(raw_bytes, modulo);
  Guarded coded_memory(coded, 0);
  Guarded overflow_memory(overflow, 0);
  if (warp_count == 0) codec::decode(code, target.data(), raw_bytes, coded_memory.data(), overflow_memory.data());
  for_each_warp(warp_count, [&] {
    const auto kernel =
        code == Code::Bfloat16 ? host_kernels::torchoffload_decode_bfloat16 : host_kernels::torchoffload_decode_widened;
    kernel(target.bytes(), raw_bytes, coded_memory.bytes(), overflow_memory.bytes());
  });
  target.check();
  return target.content();
}

}  // namespace

void bind_codec_testing(py::module_& module) {
  py::module_ codec = module.def_submodule("codec", "The lossless codes.");
  py::enum_<Code>(codec, "Code").value("BFLOAT16", Code::Bfloat16).value("WIDENED", Code::Widened);
  codec.def("encode", encode, py::arg("code"), py::arg("raw"), py::arg("modulo") = 0, py::arg("tag") = 0,
            py::arg("warp_count") = 0);
  codec.def("decode", decode, py::arg("code"), py::arg("coded"), py::arg("overflow"), py::arg("raw_bytes"),
            py::arg("modulo") = 0, py::arg("warp_count") = 0);
  codec.def("kernel_source", codec::kernel_source);
  codec.def("looks_codable", [](Code code, const std::string& raw) {
    return codec::looks_codable(code, reinterpret_cast<const std::byte*>(raw.data()), raw.size());
  });
  codec.def("link_share", [](Code code, const std::string& raw) {
    return codec::link_share(code, reinterpret_cast<const std::byte*>(raw.data()), raw.size());
  });
  codec.def("piece_bytes", [](Code code, uint64_t raw_bytes) { return PieceLayout::of(code, raw_bytes).nbytes; });
  codec.def("most_coded_bytes", codec::most_coded_bytes);
  codec.def("slot_bytes", [](Code code, uint64_t record_bytes, uint64_t piece_bytes) {
    return codec::Pieces(code, record_bytes, piece_bytes).slot_bytes();
  });
  codec.def("pieces", [](Code code, uint64_t record_bytes, uint64_t piece_bytes) {
    using Begin = uint64_t;
    using End = uint64_t;
    std::vector<std::tuple<Begin, End, Begin, End, Begin>> all;
    const codec::Pieces pieces(code, record_bytes, piece_bytes);
    for (uint64_t index = 0; index < pieces.count(); ++index) {
      const codec::Piece piece = pieces.at(index);
      all.emplace_back(piece.raw.begin, piece.raw.end, piece.coded.begin, piece.coded.end, piece.overflow_begin);
    }
    return all;
  });
}

}  // namespace torchoffload
