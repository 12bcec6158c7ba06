#include "cuda_driver.h"

#include <dlfcn.h>

#include <mutex>

namespace jaxcoded::cuda {
namespace {

constexpr const char* usual = "libcuda.so.1";

std::mutex loading;
Driver table;
std::string loaded;  // the library that `table` was loaded from

template <class... In>
bool find(void* library, Function<In...>& function, std::string& missing) {
  void* address = dlsym(library, function.name);
  if (!address) missing = function.name;
  function.address = reinterpret_cast<int (*)(In...)>(address);
  return address != nullptr;
}

std::string load_locked(const std::string& wanted) {
  const std::string name = wanted.empty() ? usual : wanted;
  if (loaded == name || (!loaded.empty() && wanted.empty())) return {};
  if (!loaded.empty()) return "the driver was loaded before, from " + loaded;
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) return "NVIDIA's driver cannot be loaded (" + std::string(dlerror()) + ")";
  Driver driver;
  std::string missing;
  const auto all = [&](auto&... functions) { return (find(library, functions, missing) && ...); };
  if (!all(driver.init, driver.error_name, driver.error_string, driver.current_context,
           driver.set_current_context, driver.create_stream, driver.context_of_stream,
           driver.query_stream, driver.synchronize, driver.wait_in_stream, driver.call_in_stream,
           driver.create_event, driver.record, driver.query_event, driver.wait_for_event, driver.pin,
           driver.unpin, driver.copy_to_host, driver.copy_to_device, driver.copy_on_device, driver.set_words)) {
    dlclose(library);
    return "NVIDIA's driver (" + name + ") has no " + missing + ": it is older than CUDA 10";
  }
  table = driver;
  if (const int code = table.init.address(0); code != success) return words_of("cuInit", code);
  loaded = name;
  return {};
}

}  // namespace

std::string load(const std::string& library) {
  std::unique_lock lock(loading);
  return load_locked(library);
}

const Driver& driver() {
  // Once loaded, the driver stays loaded.
  static const bool here = [] {
    if (const std::string error = load({}); !error.empty()) throw Failure{error};
    return true;
  }();
  static_cast<void>(here);
  return table;
}

std::string words_of(const char* function, int code) {
  const char* name = nullptr;
  const char* meaning = nullptr;
  table.error_name.address(code, &name);
  table.error_string.address(code, &meaning);
  return std::string(function) + " failed: " + (name ? name : "error " + std::to_string(code)) +
         (meaning ? " (" + std::string(meaning) + ")" : "");
}

Current::Current(Context context) {
  driver().current_context(&before_);
  if (before_ == context) return;
  driver().set_current_context(context);
  changed_ = true;
}

Current::~Current() {
  if (changed_) driver().set_current_context.address(before_);
}

}  // namespace jaxcoded::cuda
