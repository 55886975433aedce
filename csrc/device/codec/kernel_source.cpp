#include "device/codec/kernel_source.h"

namespace torchoffload::codec {

namespace {

// The definitions that kernels.def is written in, for a GPU. `load16` and `store16` test the address in each call; the
// branch is the same for all lanes.
constexpr const char* kPrelude = R"cuda(
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
#define INLINE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(256)

template <typename T>
struct PerLane {
  T value;
  __device__ __forceinline__ T& operator[](u32) { return value; }
};

INLINE u32 first_lane() { return threadIdx.x % 32; }
INLINE u32 end_lane() { return first_lane() + 1; }
INLINE u64 warp_index() { return (u64(blockIdx.x) * blockDim.x + threadIdx.x) / 32; }
INLINE u64 warp_count() { return u64(gridDim.x) * blockDim.x / 32; }

INLINE u32 warp_max(PerLane<u32>& of) {
  u32 most = of.value;
  for (u32 apart = 16; apart > 0; apart /= 2) {
    const u32 other = __shfl_xor_sync(0xffffffffu, most, apart);
    most = other > most ? other : most;
  }
  return most;
}
INLINE bool warp_any(PerLane<bool>& of) { return __any_sync(0xffffffffu, of.value) != 0; }

INLINE bool is_aligned(const u8* address) { return (reinterpret_cast<u64>(address) & 15) == 0; }
INLINE u32 load4(const u8* from) { return *reinterpret_cast<const u32*>(from); }
INLINE void store4(u8* to, u32 word) { *reinterpret_cast<u32*>(to) = word; }
INLINE void store8(u8* to, u32 low, u32 high) { *reinterpret_cast<uint2*>(to) = make_uint2(low, high); }
INLINE void load16(const u8* from, u32* words) {
  if (is_aligned(from)) {
    const uint4 all = *reinterpret_cast<const uint4*>(from);
    words[0] = all.x;
    words[1] = all.y;
    words[2] = all.z;
    words[3] = all.w;
  } else {
    for (u32 word = 0; word < 4; ++word) {
      words[word] = from[4 * word] | u32(from[4 * word + 1]) << 8 | u32(from[4 * word + 2]) << 16 |
                    u32(from[4 * word + 3]) << 24;
    }
  }
}
INLINE void store16(u8* to, const u32* words) {
  if (is_aligned(to)) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    for (u32 place = 0; place < 16; ++place) to[place] = u8(words[place / 4] >> (place % 4 * 8));
  }
}
)cuda";

#define TORCHOFFLOAD_KERNELS(...) #__VA_ARGS__
constexpr const char* kKernels =
#include "device/codec/kernels.def"
    ;
#undef TORCHOFFLOAD_KERNELS

}  // namespace

std::string kernel_source() { return std::string(kPrelude) + kKernels; }

}  // namespace torchoffload::codec
