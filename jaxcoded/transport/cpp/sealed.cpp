#include "sealed.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace jaxcoded {
namespace {

constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW;

}  // namespace

Descriptor::Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

void cannot_share(const std::string& what) {
  throw std::runtime_error("no memory can be shared between processes: " + what + " failed: " +
                           std::strerror(errno));
}

Descriptor make_sealed(const char* name, std::size_t bytes) {
  Descriptor out(static_cast<int>(syscall(SYS_memfd_create, name, MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  if (!out) cannot_share("memfd_create");
  if (ftruncate(out.number(), static_cast<off_t>(bytes)) != 0) cannot_share("ftruncate");
  if (fcntl(out.number(), F_ADD_SEALS, seals | F_SEAL_SEAL) != 0) cannot_share("fcntl(F_ADD_SEALS)");
  return out;
}

Descriptor open_sealed(std::int64_t pid, std::int64_t number, std::size_t bytes, bool to_write) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number);
  // The number may belong to another process, for example of another host, which may have any file open under
  // that descriptor.
  Descriptor out(
      open(path.c_str(), (to_write ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (!out) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) cannot_share("open of " + path);
    return out;
  }
  const int sealed = fcntl(out.number(), F_GET_SEALS);
  struct stat status;
  const bool is_it = sealed >= 0 && (sealed & seals) == seals && fstat(out.number(), &status) == 0 &&
                     status.st_size == static_cast<off_t>(bytes);
  return is_it ? std::move(out) : Descriptor();
}

}  // namespace jaxcoded
