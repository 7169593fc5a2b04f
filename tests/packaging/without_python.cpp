// Loads the operator library in a process without Python and calls an operator by its name.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/ones.h>
#include <dlfcn.h>

#include <iostream>

int main(int /*count*/, char** arguments) {
  if (dlopen(arguments[1], RTLD_NOW) == nullptr) {
    std::cerr << dlerror() << '\n';
    return 2;
  }
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("collx::allreduce", "");
  torch::jit::Stack stack{at::ones({4}), "sum", "model", "auto", 0};
  try {
    op.callBoxed(stack);
  } catch (const c10::ValueError& error) {
    std::cout << error.what_without_backtrace() << '\n';
  }
  const bool python = dlsym(RTLD_DEFAULT, "Py_IsInitialized") != nullptr;
  std::cout << (python ? "with Python" : "without Python") << '\n';
}
