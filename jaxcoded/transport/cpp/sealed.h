// Memory that processes of one host share: a file without a name. Its length is fixed, since processes that
// have mapped the file would die if it shrank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace jaxcoded {

// The descriptor of an open file, closed when this object is destroyed.
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

// Make a file of this length. `name` is shown in /proc. Throws if the file cannot be made. A page takes no
// memory before something is written to it.
Descriptor make_sealed(const char* name, std::size_t bytes);
// Open a file of another process by its descriptor's number there. Returns no descriptor if the number now
// belongs to a file of another kind or length, or to no file. Throws if this process is out of descriptors.
Descriptor open_sealed(std::int64_t pid, std::int64_t number, std::size_t bytes, bool to_write);

[[noreturn]] void cannot_share(const std::string& what);

}  // namespace jaxcoded
