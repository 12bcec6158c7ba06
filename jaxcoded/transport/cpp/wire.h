// What a node needs from its surroundings.
#pragma once

#include <cstddef>

#include "copy.h"
#include "message.h"
#include "pool.h"

namespace jaxcoded {

class Wire {
 public:
  virtual ~Wire() = default;

  // Messages to one rank arrive in the order in which they were sent, or never.
  virtual void send(Rank to, const Message& message) = 0;

  // Fetch a piece that `from` announced, which lies at `address` in its memory. `how`: the kind of copy, if
  // this process copies the piece itself.
  //   done: it is at `to` now.
  //   pending: `Node::arrived` will be called with it.
  //   gone: `from` no longer has it.
  enum class Fetch { done, pending, gone };
  virtual Fetch fetch(Rank from, Object object, std::uint32_t piece, std::uint64_t address,
                      std::byte* to, std::size_t bytes, Copy how) = 0;

  // Objects of this kind from before `first_valid` are about to change. Other ranks may be fetching them right
  // now.
  virtual void withdraw(Object::What what, Round first_valid) = 0;

  // Memory for vectors that others fetch.
  virtual Source& memory() { return heap; }

  // Messages to `to` carry their vectors with them if these have at most this many bytes.
  virtual std::size_t inline_bytes(Rank to) const = 0;

  // Whether fetching from this rank usually takes no time.
  virtual bool direct(Rank from) const = 0;

  // Seconds on this wire's clock, from an arbitrary origin.
  virtual double now() const = 0;
};

}  // namespace jaxcoded
