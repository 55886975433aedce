#include "device/cuda_coder.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/codec/codes.h"
#include "device/codec/kernel_source.h"
#include "device/cuda_backend.h"
#include "device/cuda_kernels.h"
#include "device/dtype_codes.h"
#include "system/background_call.h"

namespace torchoffload {

namespace {

constexpr uint64_t kPieceBytes = uint64_t{16} << 20;  // 0.2 ms on a link of 55 GB/s
constexpr uint64_t kLeastBytes = uint64_t{1} << 20;
// A coding kernel gets no processor before blocks of the kernel that runs end, and these take up to 2.4 ms in a matrix
// product or in the backward of attention. Eight pieces of coded bfloat16 take 1.8 ms on that link.
constexpr size_t kLaneCount = 8;
constexpr uint32_t kThreads = 256;
constexpr uint32_t kGridBlocksOfProcessor = 4;

// Throws std::runtime_error, and takes the error away from the next call of CUDA.
void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// The kernels of one device.
class Kernels {
 public:
  explicit Kernels(int device_index) : module_(codec::kernel_source(), device_index) {
    for (const codec::Code code : codec::kCodes) {
      encode_.at(static_cast<size_t>(code)) = module_.kernel(codec::encode_kernel(code));
      decode_.at(static_cast<size_t>(code)) = module_.kernel(codec::decode_kernel(code));
    }
    int processors = 0;
    require(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device_index), "no processor count");
    most_grid_blocks_ = static_cast<uint32_t>(processors) * kGridBlocksOfProcessor;
  }

  void encode(CodedPiece piece, uint64_t tag, cudaStream_t stream) const {
    const codec::PieceLayout layout = codec::PieceLayout::of(piece.code, piece.raw_bytes);
    uint64_t tag_begin = layout.tag_begin;
    std::array<void*, 6> arguments{&piece.raw, &piece.raw_bytes, &piece.coded, &piece.overflow, &tag, &tag_begin};
    launch(encode_.at(static_cast<size_t>(piece.code)), grid_blocks(layout), kThreads, arguments.data(), stream);
  }

  void decode(CodedPiece piece, cudaStream_t stream) const {
    std::array<void*, 4> arguments{&piece.raw, &piece.raw_bytes, &piece.coded, &piece.overflow};
    launch(decode_.at(static_cast<size_t>(piece.code)),
           grid_blocks(codec::PieceLayout::of(piece.code, piece.raw_bytes)), kThreads, arguments.data(), stream);
  }

 private:
  uint32_t grid_blocks(const codec::PieceLayout& layout) const {
    constexpr uint64_t kBlocksAtOnce = kThreads / 32;  // a warp has one
    const uint64_t wanted = (layout.block_count + kBlocksAtOnce - 1) / kBlocksAtOnce;
    return static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, most_grid_blocks_));
  }

  CudaModule module_;
  std::array<CudaModule::Kernel, codec::kCodes.size()> encode_{}, decode_{};  // by code
  uint32_t most_grid_blocks_ = 1;
};

// ---- the self-test ----

// Values of every kind: blocks of near and of distant exponents, zeros, subnormal numbers, infinities and NaNs, and a
// tail. Among widened values there are some blocks with one value that is not.
std::vector<std::byte> test_bytes(codec::Code code) {
  constexpr uint64_t kBlocks = 97;
  constexpr uint64_t kTailBytes = 77;
  const uint64_t value_bytes = code == codec::Code::Widened ? 4 : 2;
  const uint64_t block_bytes = codec::block_of(code).raw;
  std::vector<std::byte> bytes(kBlocks * block_bytes + kTailBytes);
  uint64_t state = 1;
  const auto next = [&state] {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<uint32_t>(state >> 33);
  };
  for (uint64_t place = value_bytes - 2; place + 1 < bytes.size(); place += value_bytes) {
    const uint64_t kind = place / block_bytes % 5;
    const uint32_t near = 120 + next() % 8;
    const uint32_t exponent = kind == 0 ? next() % 256 : kind == 1 && next() % 4 == 0 ? 0 : kind == 2 ? 255 : near;
    const auto value = static_cast<uint16_t>((next() & 0x807f) | (kind == 3 ? next() % 2 : exponent) << 7);
    std::memcpy(bytes.data() + place, &value, sizeof(value));
  }
  if (code == codec::Code::Widened) {
    for (uint64_t block = 0; block < kBlocks; block += 7)
      bytes[block * block_bytes + block % codec::kBlockValues * value_bytes + block % 2] = std::byte{1};
  }
  return bytes;
}

constexpr uint64_t kMostModulo = 2;  // of the raw bytes' address

// The memory of the self-tests, with room for each of them. It is kept for ever: giving it back could wait for all work
// of the device, and hold up the program's calls meanwhile.
class TestMemory {
 public:
  TestMemory() {
    for (const codec::Code code : codec::kCodes) {
      const uint64_t nbytes = test_bytes(code).size();
      raw_bytes_ = std::max(raw_bytes_, nbytes + kMostModulo);
      coded_bytes_ = std::max(coded_bytes_, codec::PieceLayout::of(code, nbytes).nbytes);
      overflow_bytes_ = std::max(overflow_bytes_, codec::overflow_bytes(code, nbytes));
    }
    source_ = on_device(raw_bytes_);
    target_ = on_device(raw_bytes_);
    coded_ = on_device(coded_bytes_);
    overflow_ = pinned(overflow_bytes_);
  }

  std::byte* source() const { return source_; }
  std::byte* target() const { return target_; }
  std::byte* coded() const { return coded_; }
  std::byte* overflow() const { return overflow_; }

  // Clears the results of an earlier test. No test is under way.
  void clear(cudaStream_t stream) const {
    require(cudaMemsetAsync(target_, 0, raw_bytes_, stream), "clearing");
    require(cudaMemsetAsync(coded_, 0, coded_bytes_, stream), "clearing");
    std::memset(overflow_, 0, overflow_bytes_);
  }

 private:
  static std::byte* on_device(uint64_t nbytes) {
    void* address = nullptr;
    require(cudaMalloc(&address, nbytes), "no device memory for the self-test");
    return static_cast<std::byte*>(address);
  }

  // Pinned as slots are, in pages of its own. Kernels are given the host's addresses.
  static std::byte* pinned(uint64_t nbytes) {
    constexpr size_t kPageBytes = 4096;
    const size_t whole_pages = round_up(nbytes, kPageBytes);
    void* const address = std::aligned_alloc(kPageBytes, whole_pages);
    if (address == nullptr) throw std::runtime_error("no host memory for the self-test");
    require(cudaHostRegister(address, whole_pages, cudaHostRegisterPortable), "no pinned memory");
    void* seen = nullptr;
    require(cudaHostGetDevicePointer(&seen, address, 0), "kernels cannot reach pinned memory");
    if (seen != address) throw std::runtime_error("kernels reach pinned memory at other addresses only");
    return static_cast<std::byte*>(address);
  }

  uint64_t raw_bytes_ = 0;
  uint64_t coded_bytes_ = 0;
  uint64_t overflow_bytes_ = 0;
  std::byte* source_ = nullptr;
  std::byte* target_ = nullptr;
  std::byte* coded_ = nullptr;
  std::byte* overflow_ = nullptr;
};

// `modulo`: of the raw bytes' address.
void test(const Kernels& kernels, const TestMemory& memory, codec::Code code, uint64_t modulo, cudaStream_t stream) {
  const std::vector<std::byte> raw = test_bytes(code);
  const codec::PieceLayout layout = codec::PieceLayout::of(code, raw.size());
  const uint64_t overflow_of_block = codec::block_of(code).overflow();
  constexpr uint64_t kTag = 0x0123456789abcdefULL;
  std::vector<std::byte> wanted(layout.nbytes), wanted_overflow(codec::overflow_bytes(code, raw.size()));
  codec::encode(code, raw.data(), raw.size(), wanted.data(), wanted_overflow.data(), kTag);

  std::vector<std::byte> seen(layout.nbytes), seen_raw(raw.size());
  const CodedPiece out{code, memory.source() + modulo, raw.size(), memory.coded(), memory.overflow()};
  CodedPiece in = out;
  in.raw = memory.target() + modulo;
  memory.clear(stream);
  require(cudaMemcpyAsync(out.raw, raw.data(), raw.size(), cudaMemcpyHostToDevice, stream), "copying");
  kernels.encode(out, kTag, stream);
  require(cudaMemcpyAsync(seen.data(), out.coded, layout.nbytes, cudaMemcpyDeviceToHost, stream), "copying");
  kernels.decode(in, stream);
  require(cudaMemcpyAsync(seen_raw.data(), in.raw, raw.size(), cudaMemcpyDeviceToHost, stream), "copying");
  require(cudaStreamSynchronize(stream), "running the kernels");

  bool is_same = seen == wanted && seen_raw == raw;
  for (uint64_t block = 0; block < layout.block_count; ++block) {
    if (wanted[layout.tops_begin + block] != std::byte{codec::kExceptionTop}) continue;
    const uint64_t begin = block * overflow_of_block;
    is_same &= std::memcmp(out.overflow + begin, wanted_overflow.data() + begin, overflow_of_block) == 0;
  }
  if (!is_same) throw std::runtime_error("the self-test failed: the kernels do not code as they have to");
}

// ---- the coder ----

class CudaCoder final : public Coder {
 public:
  explicit CudaCoder(int device_index) : device_index_(static_cast<c10::DeviceIndex>(device_index)) {}

  bool prepare() override {
    making_.begin();
    return state_.load(std::memory_order_acquire) == State::Ready;
  }

  std::string obstacle() const override {
    return state_.load(std::memory_order_acquire) == State::Refused ? obstacle_ : std::string();
  }

  void await_prepared() override { making_.await_end(); }
  void stop() override { making_.stop(); }

  std::optional<codec::Code> code_of(uint8_t dtype) const override { return code_of_dtype(dtype); }
  uint64_t least_bytes() const override { return kLeastBytes; }
  uint64_t piece_bytes() const override { return kPieceBytes; }
  size_t lane_count() const override { return kLaneCount; }
  StreamId encode_stream() override { return encode_stream_; }
  StreamId decode_stream() override { return decode_stream_; }

  void encode(const CodedPiece& piece, uint64_t tag, StreamId stream) override {
    const OnThread on_thread(device_index_);
    kernels_->encode(piece, tag, raw_cuda_stream(stream));
  }

  void decode(const CodedPiece& piece, StreamId stream) override {
    const OnThread on_thread(device_index_);
    kernels_->decode(piece, raw_cuda_stream(stream));
  }

 private:
  enum class State : uint8_t { New, Ready, Refused };

  // A call of the driver needs the device's context on the calling thread. CUDA's runtime sets it in most calls, but
  // not in a call that only asks which device is current.
  class OnThread {
   public:
    explicit OnThread(c10::DeviceIndex device) {
      int current = 0;
      C10_CUDA_CHECK(cudaGetDevice(&current));
      if (current != device) guard_.set_index(device);
      C10_CUDA_CHECK(cudaSetDevice(device));
    }

   private:
    c10::cuda::OptionalCUDAGuard guard_;
  };

  // Runs on a thread of its own, while the program's first step goes on. No part of a CUDA graph that another thread
  // captures.
  void make(const BackgroundCall& call) {
    State made = State::Refused;
    try {
      const OnThread on_thread(device_index_);
      const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
      const auto& memory = *new TestMemory;  // first, before the program's step has taken the device's memory
      kernels_.emplace(device_index_);
      if (!call.may_go_on()) return;
      encode_stream_ = make_urgent_cuda_stream(device_index_);
      decode_stream_ = make_urgent_cuda_stream(device_index_);
      for (const codec::Code code : codec::kCodes) {
        for (const uint64_t modulo : {uint64_t{0}, kMostModulo}) {
          if (!call.may_go_on()) return;
          test(*kernels_, memory, code, modulo, raw_cuda_stream(encode_stream_));
        }
      }
      made = State::Ready;
    } catch (const std::exception& error) {
      obstacle_ = error.what();
    }
    state_.store(made, std::memory_order_release);
  }

  const c10::DeviceIndex device_index_;
  std::atomic<State> state_ = State::New;
  // Written before state_ is.
  std::optional<Kernels> kernels_;
  StreamId encode_stream_ = kNoStream;
  StreamId decode_stream_ = kNoStream;
  std::string obstacle_;
  BackgroundCall making_{"coding-kernels", [this](const BackgroundCall& call) { make(call); }};
};

// Null if a device has none yet.
std::array<CudaCoder*, C10_COMPILE_TIME_MAX_GPUS>& known_coders() {
  static auto* const leaked = new std::array<CudaCoder*, C10_COMPILE_TIME_MAX_GPUS>{};
  return *leaked;
}

// False also in a forked child, which cannot ask.
bool has_context(c10::DeviceIndex device_index) {
  try {
    return c10::cuda::hasPrimaryContext(device_index);
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

Coder& cuda_coder(int device_index) {
  CudaCoder*& coder = known_coders().at(static_cast<size_t>(device_index));
  if (coder == nullptr) coder = new CudaCoder(device_index);
  return *coder;
}

void make_cuda_coders() {
  const c10::DeviceIndex device_count = c10::cuda::device_count();
  for (c10::DeviceIndex index = 0; index < device_count; ++index) {
    if (has_context(index)) cuda_coder(index);
  }
}

std::vector<Coder*> cuda_coders() {
  std::vector<Coder*> made;
  for (CudaCoder* const coder : known_coders()) {
    if (coder != nullptr) made.push_back(coder);
  }
  return made;
}

}  // namespace torchoffload
