// Memory that processes of one host share: a file without a name. Its length is fixed: processes that have
// mapped the file would die if it shrank.
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

// `name` is shown in /proc. Throws if no such file can be made. A page takes no memory until something is
// written to it.
Descriptor make_sealed(const char* name, std::size_t bytes);
// Open a file of another process, under the number that the file has there. Returns none if there is no such
// file of this length: the number may belong to any other file by now. Throws if this process is out of
// descriptors.
Descriptor open_sealed(std::int64_t pid, std::int64_t number, std::size_t bytes, bool to_write);

[[noreturn]] void cannot_share(const std::string& what);

}  // namespace jaxcoded
