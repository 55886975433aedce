# Asks the target environment's interpreter for its torch and defines
#   TargetTorch::torch   include directories, libraries, and the ABI of std::string
#   TargetTorch::cuda    on a CUDA torch, the CUDA run-time's headers and libcudart
#   TargetTorch::cuda_headers   on a CPU torch and where CUDA headers are found, what compiling the CUDA backend takes
# besides TORCH_VERSION, TORCH_CUDA_VERSION (empty on a CPU or ROCm torch), TORCH_HIP_VERSION (empty on others than ROCm)
# and TORCH_CUDA_HEADERS_VERSION.
# Where TORCHOFFLOAD_TORCH_DIR names the directory of a torch package, it is that torch, as if it were a CPU build.
# Not find_package(Torch): on a CUDA torch that demands a full toolkit, where headers are enough.

set(_probe "${PROJECT_SOURCE_DIR}/tools/probe_torch.py")
set(_found "${CMAKE_CURRENT_BINARY_DIR}/target_torch.cmake")
set(_which "")
if(TORCHOFFLOAD_TORCH_DIR)
  set(_which --for-wheel "${TORCHOFFLOAD_TORCH_DIR}")
endif()
execute_process(
  COMMAND "${Python_EXECUTABLE}" -I "${_probe}" --cmake "${_found}" ${_which}
  RESULT_VARIABLE _result
  ERROR_VARIABLE _reason
  ERROR_STRIP_TRAILING_WHITESPACE)
if(NOT _result EQUAL 0)
  # The leading blank keeps CMake from wrapping the sentence.
  message(FATAL_ERROR " ${_reason}")
endif()
include("${_found}")

# Another torch in the same environment configures again.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${_probe}" "${TORCH_DIR}/version.py")

add_library(TargetTorch::torch INTERFACE IMPORTED)
target_include_directories(TargetTorch::torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
target_compile_definitions(TargetTorch::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${TORCH_CXX11_ABI})
target_link_libraries(TargetTorch::torch INTERFACE ${TORCH_LIBRARIES})
if(TORCH_HIP_VERSION)
  # Some classes in torch's headers have more virtual functions under it. No header of HIP is included.
  target_compile_definitions(TargetTorch::torch INTERFACE USE_ROCM=1)
endif()

if(TORCH_CUDA_VERSION)
  add_library(TargetTorch::cuda INTERFACE IMPORTED)
  target_include_directories(TargetTorch::cuda SYSTEM INTERFACE ${TORCH_CUDA_INCLUDE_DIRS})
  target_link_libraries(TargetTorch::cuda INTERFACE "${TORCH_CUDART_LIBRARY}")
elseif(TORCH_CUDA_INCLUDE_DIRS)
  # The one header of c10/cuda that a CPU wheel leaves out.
  file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/cuda_headers/c10/cuda/impl/cuda_cmake_macros.h"
       CONTENT "#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
  add_library(TargetTorch::cuda_headers INTERFACE IMPORTED)
  target_include_directories(TargetTorch::cuda_headers SYSTEM INTERFACE
    "${CMAKE_CURRENT_BINARY_DIR}/cuda_headers" ${TORCH_CUDA_INCLUDE_DIRS})
endif()
message(STATUS "torch ${TORCH_VERSION} (CUDA: ${TORCH_CUDA_VERSION}, HIP: ${TORCH_HIP_VERSION}) in ${TORCH_DIR}")
