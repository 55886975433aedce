// What CUDA's own calls cost the host in the order in which one moved tensor makes them: a point on the computing
// stream, our stream's wait for it, the copy, its end, the computing stream's wait for an earlier end. Microseconds a
// call, medians of 200; hot, and with the caches filled by other data before each call, as other code does in a step.
//
//     nvcc -O2 -arch=native -o driver_calls benchmarks/driver_calls.cu && ./driver_calls
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr size_t kKiB = 1024;
constexpr size_t kMiB = 1024 * kKiB;
constexpr size_t kHostBytes = 2048 * kMiB;
constexpr size_t kEvictedBytes = 4 * kMiB;
constexpr int kRounds = 200;
constexpr int kInFlight = 4;  // copies between an end and the wait for it

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

__global__ void spin(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

double now_us() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

void evict(bool is_cold) {
  static std::vector<char> data(kEvictedBytes);
  static volatile int sink;
  if (!is_cold) return;
  int sum = 0;
  for (size_t at = 0; at < data.size(); at += 64) sum += data[at]++;
  sink = sum;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::vector<cudaEvent_t> make_events() {
  std::vector<cudaEvent_t> events(kRounds);
  for (cudaEvent_t& event : events) check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
  return events;
}

}  // namespace

int main() {
  constexpr size_t kHugePageBytes = 2 * kMiB;
  void* mapped = mmap(nullptr, kHostBytes + kHugePageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return std::perror("mmap"), 1;
  const size_t begin = (reinterpret_cast<size_t>(mapped) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  char* const host = reinterpret_cast<char*>(begin);
  madvise(host, kHostBytes, MADV_HUGEPAGE);
  std::memset(host, 0, kHostBytes);
  check(cudaHostRegister(host, kHostBytes, cudaHostRegisterPortable), "register");
  char* on_device = nullptr;
  check(cudaMalloc(&on_device, kHostBytes), "malloc");
  const cudaStream_t compute = nullptr;
  cudaStream_t ours = nullptr;
  check(cudaStreamCreateWithFlags(&ours, cudaStreamNonBlocking), "stream");
  const std::vector<cudaEvent_t> ready = make_events();
  const std::vector<cudaEvent_t> done = make_events();
  spin<<<1, 1>>>(1000);
  check(cudaDeviceSynchronize(), "synchronize");

  std::printf("us of the host   KiB  kernel  point   wait   copy    end   wait    all but the kernel\n");
  for (const bool is_in : {false, true}) {
    for (const bool is_cold : {false, true}) {
      for (const size_t nbytes : {4 * kKiB, 64 * kKiB, kMiB, 8 * kMiB, 64 * kMiB}) {
        std::vector<double> taken[6];
        for (int round = 0; round < kRounds; ++round) {
          if (nbytes > kMiB && round % 40 == 39) check(cudaDeviceSynchronize(), "synchronize");  // queues stay short
          char* const there = host + round % (kHostBytes / nbytes) * nbytes;
          char* const here = on_device + round % (kHostBytes / nbytes) * nbytes;
          int call = 0;
          const auto timed = [&](auto make_call) {
            evict(is_cold);
            const double start_us = now_us();
            const cudaError_t error = make_call();
            taken[call++].push_back(now_us() - start_us);
            check(error, "a timed call");
          };
          timed([&] { return spin<<<1, 32, 0, compute>>>(60'000), cudaSuccess; });
          timed([&] { return cudaEventRecord(ready[round], compute); });
          timed([&] { return cudaStreamWaitEvent(ours, ready[round], 0); });
          timed([&] {
            return is_in ? cudaMemcpyAsync(here, there, nbytes, cudaMemcpyHostToDevice, ours)
                         : cudaMemcpyAsync(there, here, nbytes, cudaMemcpyDeviceToHost, ours);
          });
          timed([&] { return cudaEventRecord(done[round], ours); });
          timed([&] {
            return round < kInFlight ? cudaSuccess : cudaStreamWaitEvent(compute, done[round - kInFlight], 0);
          });
        }
        check(cudaDeviceSynchronize(), "synchronize");
        std::printf("%-4s %-4s %11zu", is_in ? "in" : "out", is_cold ? "cold" : "hot", nbytes / kKiB);
        double sum_us = 0;
        for (const std::vector<double>& times : taken) std::printf("%7.1f", median(times));
        for (int call = 1; call < 6; ++call) sum_us += median(taken[call]);
        std::printf("%10.1f\n", sum_us);
      }
    }
  }
}
