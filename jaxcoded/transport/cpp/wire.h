// The interface through which a node reaches the other ranks.
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
  //   done: the piece is at `to` now.
  //   pending: `Node::arrived` will be called with the piece.
  //   gone: `from` no longer has the piece.
  enum class Fetch { done, pending, gone };
  virtual Fetch fetch(Rank from, Object object, std::uint32_t piece, std::uint64_t address,
                      std::byte* to, std::size_t bytes, Copy how) = 0;

  // Declare objects of this kind from before `first_valid` invalid, since they are about to change. Other ranks
  // may be fetching them right now.
  virtual void withdraw(Object::What what, Round first_valid) = 0;

  // Return memory for vectors that other ranks fetch.
  virtual Source& memory() { return heap; }

  // Messages to `to` contain their vectors if these have at most this many bytes in all.
  virtual std::size_t inline_bytes(Rank to) const = 0;

  // Whether fetching from this rank usually takes no time.
  virtual bool direct(Rank from) const = 0;

  // Return the seconds on this wire's clock, from an arbitrary origin.
  virtual double now() const = 0;
};

}  // namespace jaxcoded
