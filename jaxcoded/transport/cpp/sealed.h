// Memory that processes of one host share: a file without a name. It can neither grow nor shrink, which would
// kill processes that have mapped it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace jaxcoded {

// An open file, closed at the end.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();

  int number() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_;
};

// `name` is shown in /proc. Throws if there can be none. A page exists once something is written to
// it.
Descriptor make_sealed(const char* name, std::size_t bytes);
// The file of another process, under its number there. None if there is no such file of this length, as
// the number may belong to any other by now. Throws if this process is out of descriptors.
Descriptor open_sealed(std::int64_t pid, std::int64_t number, std::size_t bytes, bool to_write);

[[noreturn]] void cannot_share(const std::string& what);

}  // namespace jaxcoded
