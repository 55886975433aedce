#include "device/cuda_kernels.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <array>
#include <stdexcept>
#include <vector>

namespace torchoffload {

namespace {

// The parts of NVRTC's and of the driver's interface that are used, as their headers declare them. Results are 0 if a
// call succeeded.
struct Library {
  int (*create_program)(void**, const char*, const char*, int, const char* const*, const char* const*) = nullptr;
  int (*compile_program)(void*, int, const char* const*) = nullptr;
  int (*get_log_size)(void*, size_t*) = nullptr;
  int (*get_log)(void*, char*) = nullptr;
  int (*get_code_size)(void*, size_t*) = nullptr;
  int (*get_code)(void*, char*) = nullptr;
  int (*destroy_program)(void**) = nullptr;
  int (*load_module)(void**, const void*) = nullptr;
  int (*get_function)(void**, void*, const char*) = nullptr;
  int (*launch_kernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cudaStream_t,
                       void**, void**) = nullptr;
};

std::string beside_c10_cuda(const std::string& name) {
  Dl_info found{};
  if (dladdr(reinterpret_cast<void*>(&c10::cuda::device_count), &found) == 0 || found.dli_fname == nullptr) return name;
  const std::string path = found.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? name : path.substr(0, slash + 1) + name;
}

std::vector<void*> opened_libraries() {
  std::vector<void*> opened;
  for (const std::string& name : {beside_c10_cuda("libcaffe2_nvrtc.so"), std::string("libnvrtc.so.13"),
                                  std::string("libnvrtc.so.12"), std::string("libcuda.so.1")}) {
    if (void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) opened.push_back(handle);
  }
  return opened;
}

// dlsym() of a library looks into those that it was linked with, too.
template <typename Function>
void find(const std::vector<void*>& libraries, const char* name, Function& function) {
  for (void* const library : libraries) {
    if (void* const address = dlsym(library, name)) {
      function = reinterpret_cast<Function>(address);
      return;
    }
  }
  throw std::runtime_error(std::string("NVRTC or the driver cannot be used: there is no ") + name);
}

Library find_library() {
  const std::vector<void*> libraries = opened_libraries();
  Library library;
  find(libraries, "nvrtcCreateProgram", library.create_program);
  find(libraries, "nvrtcCompileProgram", library.compile_program);
  find(libraries, "nvrtcGetProgramLogSize", library.get_log_size);
  find(libraries, "nvrtcGetProgramLog", library.get_log);
  find(libraries, "nvrtcGetCUBINSize", library.get_code_size);
  find(libraries, "nvrtcGetCUBIN", library.get_code);
  find(libraries, "nvrtcDestroyProgram", library.destroy_program);
  find(libraries, "cuModuleLoadData", library.load_module);
  find(libraries, "cuModuleGetFunction", library.get_function);
  find(libraries, "cuLaunchKernel", library.launch_kernel);
  return library;
}

// Throws each time until all is found. Leaked on purpose.
const Library& library() {
  static const auto* const leaked = new Library(find_library());
  return *leaked;
}

void check(int result, const char* call) {
  if (result != 0) throw std::runtime_error(std::string(call) + " failed with the error " + std::to_string(result));
}

class Program {
 public:
  explicit Program(const std::string& source) {
    check(library().create_program(&program_, source.c_str(), "torchoffload.cu", 0, nullptr, nullptr),
          "nvrtcCreateProgram");
  }
  ~Program() { library().destroy_program(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  std::vector<char> compile(const std::string& architecture) {
    const std::string target = "--gpu-architecture=" + architecture;
    const std::array<const char*, 2> options{target.c_str(), "--std=c++17"};
    const int result = library().compile_program(program_, static_cast<int>(options.size()), options.data());
    if (result != 0) throw std::runtime_error("the kernels do not compile for " + architecture + ": " + log());
    size_t nbytes = 0;
    check(library().get_code_size(program_, &nbytes), "nvrtcGetCUBINSize");
    std::vector<char> code(nbytes);
    check(library().get_code(program_, code.data()), "nvrtcGetCUBIN");
    return code;
  }

 private:
  std::string log() {
    size_t nbytes = 0;
    if (library().get_log_size(program_, &nbytes) != 0) return {};
    std::string text(nbytes, '\0');
    if (library().get_log(program_, text.data()) != 0) return {};
    return text.substr(0, text.find('\n'));
  }

  void* program_ = nullptr;
};

std::string architecture_of(int device_index) {
  int major = 0;
  int minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_index), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_index), "cudaDeviceGetAttribute");
  return "sm_" + std::to_string(major) + std::to_string(minor);
}

}  // namespace

CudaModule::CudaModule(const std::string& source, int device_index) {
  const std::vector<char> code = Program(source).compile(architecture_of(device_index));
  check(library().load_module(&module_, code.data()), "cuModuleLoadData");
}

CudaModule::Kernel CudaModule::kernel(const char* name) const {
  void* function = nullptr;
  check(library().get_function(&function, module_, name), "cuModuleGetFunction");
  return function;
}

void launch(CudaModule::Kernel kernel, uint32_t grid_blocks, uint32_t block_threads, void** arguments,
            cudaStream_t stream) {
  const int result =
      library().launch_kernel(kernel, grid_blocks, 1, 1, block_threads, 1, 1, 0, stream, arguments, nullptr);
  TORCH_CHECK(result == 0, "torchoffload: a kernel could not be launched: the driver's error ", result);
}

}  // namespace torchoffload
