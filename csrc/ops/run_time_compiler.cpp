#include "run_time_compiler.h"

#if !COLLX_CUDA
namespace collx {
MadeKernels made_kernels() { return {}; }
}  // namespace collx
#else
#include <ATen/DynamicLibrary.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/env.h>
#include <c10/util/hash.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nvrtc.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <vector>

#include "kernel_cache.h"
#include "streams.h"

namespace collx {
namespace {

namespace fs = std::filesystem;

std::atomic<uint64_t> compiled_count{0}, found_count{0};

/// The functions of the NVRTC library that PyTorch's own libraries use.
struct Nvrtc {
#define COLLX_NVRTC(NAME) \
  decltype(&::nvrtc##NAME) NAME = of<decltype(&::nvrtc##NAME)>("nvrtc" #NAME)
  at::DynamicLibrary library{("libnvrtc.so." + std::to_string(CUDART_VERSION / 1000)).c_str(),
                             nullptr, /*leak_handle=*/true};
  COLLX_NVRTC(Version);
  COLLX_NVRTC(CreateProgram);
  COLLX_NVRTC(DestroyProgram);
  COLLX_NVRTC(AddNameExpression);
  COLLX_NVRTC(CompileProgram);
  COLLX_NVRTC(GetProgramLogSize);
  COLLX_NVRTC(GetProgramLog);
  COLLX_NVRTC(GetCUBINSize);
  COLLX_NVRTC(GetCUBIN);
  COLLX_NVRTC(GetErrorString);
#undef COLLX_NVRTC

  void require(nvrtcResult result, const char* what) const {
    TORCH_CHECK(result == NVRTC_SUCCESS, "collx: ", what, ": ", GetErrorString(result));
  }

 private:
  template <typename F>
  F of(const char* name) {
    return reinterpret_cast<F>(library.sym(name));
  }
};

const Nvrtc& nvrtc() {
  static const Nvrtc loaded;
  return loaded;
}

std::string contents_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The folder of the kernels' headers: next to this library, or in the source tree of its build.
const fs::path& headers() {
  static const fs::path found = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<const void*>(&made_kernels), &info);
    const fs::path here = fs::absolute(info.dli_fname).parent_path();
    for (const char* folder : {"../include", "../../../csrc"}) {
      fs::path candidate = (here / folder).lexically_normal();
      if (fs::is_directory(candidate / "protocol")) return candidate;
    }
    return fs::path();
  }();
  TORCH_CHECK(!found.empty(), "collx: the headers of the kernels are missing; reinstall collx");
  return found;
}

/// The hash of all headers, so that a build does not use cached kernels of a different build.
const std::string& hash_of_headers() {
  static const std::string hash = [] {
    std::vector<fs::path> files;
    for (const char* part : {"protocol", "cuda"}) {
      for (const auto& entry : fs::recursive_directory_iterator(headers() / part)) {
        const fs::path suffix = entry.path().extension();
        if (suffix == ".h" || suffix == ".cuh") files.push_back(entry.path());
      }
    }
    std::sort(files.begin(), files.end());
    std::string all;
    for (const fs::path& file : files)
      all += file.lexically_relative(headers()).string() + contents_of(file);
    return c10::sha1(all).str();
  }();
  return hash;
}

std::string architecture() {
  int device = 0, major = 0, minor = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return "sm_" + std::to_string(10 * major + minor);
}

std::string versions() {
  int driver = 0, major = 0, minor = 0;
  C10_CUDA_CHECK(cudaDriverGetVersion(&driver));
  nvrtc().require(nvrtc().Version(&major, &minor), "querying the version of NVRTC");
  std::ostringstream out;
#define COLLX_WORDS(...) #__VA_ARGS__
#define COLLX_TEXT(...) COLLX_WORDS(__VA_ARGS__)
  out << COLLX_TEXT(COLLX_VERSION) << ' ' << driver << ' ' << major << '.' << minor;
  return out.str();
}

/// COLLX_CACHE_DIR, or collx in the user's cache folder. If empty, kernels are not cached.
fs::path cache_folder() {
  if (const auto given = c10::utils::get_env("COLLX_CACHE_DIR")) return *given;
  const auto caches = c10::utils::get_env("XDG_CACHE_HOME");
  if (caches && !caches->empty()) return fs::path(*caches) / "collx";
  const auto home = c10::utils::get_env("HOME");
  return home && !home->empty() ? fs::path(*home) / ".cache" / "collx" : fs::path();
}

std::string compile(const std::string& program, const std::string& kernel,
                    const std::vector<std::string>& options) {
  const Nvrtc& n = nvrtc();
  nvrtcProgram made = nullptr;
  n.require(n.CreateProgram(&made, program.c_str(), "epilogue.cu", 0, nullptr, nullptr),
            "making a program");
  const auto destroy = [&n](nvrtcProgram* p) { n.DestroyProgram(p); };
  const std::unique_ptr<nvrtcProgram, decltype(destroy)> guard(&made, destroy);
  n.require(n.AddNameExpression(made, kernel.c_str()), "naming the kernel");
  std::vector<const char*> given;
  for (const std::string& option : options) given.push_back(option.c_str());
  const nvrtcResult result = n.CompileProgram(made, static_cast<int>(given.size()), given.data());
  if (result != NVRTC_SUCCESS) {
    size_t size = 0;
    n.GetProgramLogSize(made, &size);
    std::string log(size, '\0');
    n.GetProgramLog(made, log.data());
    TORCH_CHECK(false,
                "collx: the kernel of an epilogue does not compile: ", n.GetErrorString(result),
                "\n", log.c_str());
  }
  size_t size = 0;
  n.require(n.GetCUBINSize(made, &size), "reading the compiled kernel");
  std::string code(size, '\0');
  n.require(n.GetCUBIN(made, code.data()), "reading the compiled kernel");
  return code;
}

}  // namespace

std::string make_kernel(const char* op, const std::string& program, const std::string& kernel) {
  using Clock = std::chrono::steady_clock;
  TORCH_CHECK(
      !capturing(c10::Device(c10::kCUDA, c10::cuda::current_device())), "collx.", op,
      ": the kernel of this epilogue is not loaded, and cannot be loaded during the capture of a "
      "CUDA graph; before the capture, call collx.warm_up with the same arguments, or make one "
      "call");
  // The same options that setup.py uses for the kernels of the library: the bits of results depend
  // on them.
  const std::vector<std::string> options = {"--gpu-architecture=" + architecture(), "-std=c++20",
                                            "--fmad=false", "-default-device",
                                            "-I" + headers().string()};
  const fs::path folder = cache_folder();
  std::string name;
  if (!folder.empty()) {
    const std::string key = program + kernel + options[0] + versions() + hash_of_headers();
    name = c10::sha1(key).str() + ".cubin";
    std::string code = kernel_cache::read(folder, name);
    if (!code.empty()) {
      ++found_count;
      return code;
    }
  }
  const auto began = Clock::now();
  std::string code = compile(program, kernel, options);
  ++compiled_count;
  LOG(WARNING) << "collx." << op << ": compiled a kernel for its epilogue, which took "
               << std::chrono::duration<double>(Clock::now() - began).count()
               << " s; collx.warm_up does that ahead of the first call";
  if (!folder.empty()) kernel_cache::keep(folder, name, code);
  return code;
}

MadeKernels made_kernels() { return {compiled_count, found_count}; }

}  // namespace collx
#endif
